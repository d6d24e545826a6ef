"""The time of an average on a far link, counted in the times that one message takes."""

import pytest
import torch

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Scratch, average
from gradwire.testing import run_virtual_ranks

SHAPES = [(90, 80), (50,), (70, 90)]


class FarGroup:
    """A virtual group with a clock. A message takes a unit of time.

    It leaves when its sender knows that it is awaited, as in Gloo. That news takes a unit of time, too.
    """

    native_sum = native_scatter = native_gather = None

    def __init__(self, group, sent):
        self.rank, self.size, self.names, self.traffic = group.rank, group.size, group.names, group.traffic
        self.now, self.sent, self.num_rounds = 0, sent, 0
        self._group = group

    def post(self, rows):
        self.num_rounds += 1
        return FarMessages(self, self._group.post(rows))


class FarMessages:
    def __init__(self, group, messages):
        self._group, self._messages = group, messages
        self._number, self._posted = group.num_rounds, group.now

    def send(self, peer, row):
        self._group.sent[self._group.rank, peer, self._number] = self._group.now
        self._messages.send(peer, row)

    def wait(self, peer):
        self._messages.wait(peer)
        sent = self._group.sent.get((peer, self._group.rank, self._number))
        if sent is not None:
            self._group.now = max(self._group.now, sent + 1, self._posted + 2)

    def finish(self):
        self._messages.finish()
        for peer in range(self._group.size):
            self.wait(peer)


def delays(spec, world_size):
    """Return the time at which the last rank has the average of a bucket."""
    slots = [Slot(f"p{i}", 0, torch.Size(shape), (*shape[1:], 1)) for i, shape in enumerate(SHAPES)]
    layout, sent = BucketLayout.packed(0, torch.float32, slots), {}

    def job(group):
        far = FarGroup(group, sent)
        flat = torch.randn(layout.numel)
        average(flat, gradwire.recipe(spec).exchange, Context(far, Scratch(), 0.5, layout, Memory(), 0))
        return far.now

    return max(run_virtual_ranks(job, world_size))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("spec", "of_two", "of_three"),
    [
        ("fp32", 3, 3),
        ("bf16", 2, 3),
        ("int8", 2, 3),
        ("int2", 2, 3),
        ("int2:bits=1+2", 3, 3),
        ("acp:factors=int4", 2, 2),
        ("powersgd:factors=int4", 4, 4),
    ],
)
def test_a_sum_takes_the_time_of_three_messages_and_one_of_few_bytes_or_two_ranks_that_of_two(
    spec, of_two, of_three, world_size
):
    assert delays(spec, world_size) == {2: of_two, 3: of_three}[world_size]


def test_a_sum_in_two_levels_takes_no_longer_for_its_last_phase():
    assert delays("int8:local_size=2", 4) == 5
    assert delays("int8:local_size=2", 6) == 6


def test_an_exact_sum_of_two_ranks_takes_the_time_of_two_messages():
    assert delays("acp:rank=1", 2) == 2
    assert delays("powersgd:rank=4", 2) == 4
