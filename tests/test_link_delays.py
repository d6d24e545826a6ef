"""The time of an average on a far link, counted in the times that one message takes."""

from collections import Counter
from datetime import timedelta

import pytest
import torch

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Scratch, average
from gradwire.peers import GlooGroup, gather
from gradwire.testing import RanksFailed, run_virtual_ranks

SHAPES = [(90, 80), (50,), (70, 90)]
NEAR_S, FAR_S = 0.0, 0.02
# What has come twice is received ahead of time. Low rank sends the same in every other step.
NUM_STEPS = 6


class FarConnection:
    """The connection of a virtual rank to all others, with a clock.

    A message takes a unit of time. It leaves when its sender knows that it is awaited, as in Gloo. That news
    takes a unit of time, too. Messages of one tag go to its receives in order.
    """

    def __init__(self, group, times):
        self.now, self.num_pending_bytes = 0, 0
        self._group, self._times, self._counts = group, times, Counter()

    def send(self, rows, peer, tag):
        row, key = rows[0].view(torch.uint8), self._key(self._group.rank, peer, tag)
        self._times["sent", key] = self.now
        self._group._shared.send(key, row)
        return FarWork(lambda: self._wait(key, peer, self._times.get(("posted", key), 0) + 1))

    def recv(self, rows, peer, tag):
        row, key = rows[0].view(torch.uint8), self._key(peer, self._group.rank, tag)
        posted = self._times["posted", key] = self.now
        self.num_pending_bytes += row.nbytes
        self._group._shared.receive(key, row)

        def wait():
            self._wait(key, peer, posted + 2)
            self.now = max(self.now, self._times["sent", key] + 1)
            self.num_pending_bytes -= row.nbytes

        return FarWork(wait)

    def _key(self, *way):
        self._counts[way] += 1
        return *way, self._counts[way]

    def _wait(self, key, peer, at_least):
        self._group._shared.wait(key, self._group.rank, peer)
        self.now = max(self.now, at_least)


class FarWork:
    def __init__(self, wait):
        self.wait = wait


def run_far_ranks(job, world_size, trip_s):
    """Run ``job(group, connection)`` on virtual ranks that are far apart."""
    times = {}

    def run(group):
        link = FarConnection(group, times)
        names, limit = range(world_size), timedelta(seconds=1)
        return job(GlooGroup(None, "far", group.rank, names, limit, (link, link), trip_s), link)

    return run_virtual_ranks(run, world_size)


def steps_of(spec, world_size, trip_s):
    """Return the averages of some steps, and the times at which the last rank has each."""
    slots = [Slot(f"p{i}", 0, torch.Size(shape), (*shape[1:], 1)) for i, shape in enumerate(SHAPES)]
    layout = BucketLayout.packed(0, torch.float32, slots)

    def job(group, link):
        random, found = torch.Generator().manual_seed(group.rank), []
        scratch, memory, exchange = Scratch(), Memory(), gradwire.recipe(spec).exchange
        for step in range(NUM_STEPS):
            flat = torch.randn(layout.numel, generator=random)
            average(flat, exchange, Context(group, scratch, 0.5, layout, memory, step))
            found.append((flat, link.now))
        return found

    ranks = run_far_ranks(job, world_size, trip_s)
    ends = [max(end for _, end in step) for step in zip(*ranks, strict=True)]
    return [flat for rank in ranks for flat, _ in rank], ends


def delays(spec, world_size, trip_s=NEAR_S):
    """Return the time of the last step."""
    _, ends = steps_of(spec, world_size, trip_s)
    return ends[-1] - ends[-2]


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


@pytest.mark.parametrize(
    ("spec", "world_size", "num_messages"),
    [
        ("int8", 2, 1),
        ("int8", 3, 2),
        ("fp32", 2, 2),
        ("fp32", 3, 2),
        ("int2:bits=1+2", 2, 2),
        ("acp:factors=int4", 3, 1),
        ("powersgd:factors=int4", 2, 2),
        ("int8:local_size=2", 4, 3),
        ("int8:local_size=2", 6, 4),
        ("int8:local_size=2,within=same", 4, 4),
    ],
)
def test_on_a_far_link_only_messages_take_time_and_bits_stay_the_same(spec, world_size, num_messages):
    assert delays(spec, world_size, FAR_S) == num_messages
    near, far = (steps_of(spec, world_size, trip_s)[0] for trip_s in (NEAR_S, FAR_S))
    assert all(map(torch.equal, near, far))


def test_a_rank_that_is_told_of_no_far_link_exchanges_with_those_that_are():
    def job(group, link):
        group.trip_s = FAR_S if group.rank else NEAR_S
        for step in range(NUM_STEPS):
            rows = [torch.full((50,), 10.0 * step + (peer == group.rank) * group.rank) for peer in range(3)]
            gather(rows, group)
            assert [row[0].item() for row in rows] == [10.0 * step + peer for peer in range(3)]

    run_far_ranks(job, 3, NEAR_S)


def test_messages_of_two_rounds_that_are_sent_in_another_order_are_an_error():
    def job(group, link):
        first, second = (group.post(list(torch.zeros(2, 8))) for _ in range(2))
        second.send(1 - group.rank, torch.ones(8))
        first.send(1 - group.rank, torch.ones(8))

    with pytest.raises(RanksFailed, match="a later round has already been sent"):
        run_far_ranks(job, 2, FAR_S)


def test_receives_of_sizes_that_never_come_again_hold_a_bounded_memory():
    most = 64 << 20

    def job(group, link):
        for step in range(300):
            num_bytes = (1 << 20) + step // 2  # each size comes twice
            gather(list(torch.zeros(2, num_bytes, dtype=torch.uint8)), group)
            assert link.num_pending_bytes <= most
        return link.num_pending_bytes

    assert min(run_far_ranks(job, 2, FAR_S)) > most - (4 << 20)


def test_no_memory_is_held_for_sizes_that_come_once_nor_for_large_ones():
    def job(group, link):
        for num_bytes in (*range(1, 200), 5 << 20, 5 << 20, 5 << 20):
            gather(list(torch.zeros(2, num_bytes, dtype=torch.uint8)), group)
        return link.num_pending_bytes

    assert run_far_ranks(job, 2, FAR_S) == [0, 0]
