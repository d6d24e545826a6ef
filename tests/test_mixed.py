"""Several encodings in one bucket, by parameter."""

from dataclasses import replace

import pytest
import torch

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Links, Mixed, Scratch, average
from gradwire.testing import run_virtual_ranks
from tests.test_link_bytes import noted

SHAPES = [(70, 33), (5,), (900,), (3, 3), (1200, 2), (0, 4), (65,)]
INT8, INT4, BF16 = (gradwire.recipe(spec).exchange for spec in ("int8", "int4", "bf16"))
INT2 = gradwire.recipe("int2:tables=same").exchange
MIXED = Mixed(((INT8, ("p0", "p1")), (INT4, ("p2", "p3")), (INT2, ("p4",))), BF16)
NUM_STEPS = 3


def layout_of(shapes, dtype=torch.float32, index=2):
    slots = [
        Slot(f"p{i}", 0, torch.Size(shape), torch.empty(shape, device="meta").stride())
        for i, shape in enumerate(shapes)
    ]
    return BucketLayout.packed(index, dtype, slots)


def values(layout, rank, step):
    torch.manual_seed(10 * step + rank)
    return torch.randn(layout.numel, dtype=layout.dtype)


def averages(exchange, layout, world_size, begin=0, end=None, whole=None):
    """Return every step's average on every rank, of a part of the bucket ``whole`` if it is given."""

    def job(group):
        memory, scratch, results = Memory(), Scratch(), []
        for step in range(NUM_STEPS):
            flat = values(whole or layout, group.rank, step)[begin:end].clone()
            average(flat, exchange, Context(group, scratch, 1 / group.size, layout, memory, step))
            results.append(flat)
        return results

    return run_virtual_ranks(job, world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_each_run_of_neighbours_is_averaged_as_it_would_be_alone(dtype):
    layout = layout_of(SHAPES, dtype)
    together = averages(MIXED, layout, 3)
    runs = MIXED.split(layout)
    assert [[slot.name for slot in run.slots] for _, run, _ in runs] == [
        ["p0", "p1"],
        ["p2", "p3"],
        ["p4"],
        ["p5", "p6"],
    ]
    assert len({run.index for _, run, _ in runs}) == len(runs), "seeds differ"
    apart = replace(MIXED, apart=("p1", "p2", "p6")).split(layout)
    assert [run.slots[0].name for _, run, _ in apart] == ["p0", "p1", "p2", "p4", "p5", "p6"]
    for exchange, run, begin in runs:
        end = begin + run.numel
        alone = averages(exchange, run, 3, begin, end, whole=layout)
        for rank in range(3):
            for step in range(NUM_STEPS):
                assert torch.equal(together[rank][step][begin:end], alone[rank][step]), (exchange, step)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_runs_share_their_messages_and_announce_every_byte(world_size, dtype):
    layout = layout_of(SHAPES, dtype)

    def job(group):
        messages = noted(group)
        flat = values(layout, group.rank, 0)
        average(flat, MIXED, Context(group, Scratch(), 1 / group.size, layout, Memory()))
        return messages

    for rank, messages in enumerate(run_virtual_ranks(job, world_size)):
        announced = MIXED.link_bytes(layout, world_size, 0)[rank]
        assert announced == Links(0, sum(size for _, size in messages))
        assert len(messages) == MIXED.link_rounds(layout, world_size, 0).across * (world_size - 1)
        assert MIXED.link_rounds(layout, world_size, 0).across == (1 if world_size == 2 else 2)


def test_runs_in_nodes_announce_every_byte_too():
    nodes = [gradwire.recipe(f"{name}:local_size=2").exchange for name in ("bf16", "int8")]
    mixed, layout = Mixed(((nodes[1], ("p0", "p1")),), nodes[0]), layout_of(SHAPES)

    def job(group):
        messages = noted(group)
        flat = values(layout, group.rank, 0)
        average(flat, mixed, Context(group, Scratch(), 1 / group.size, layout, Memory()))
        return messages, flat

    ranks = run_virtual_ranks(job, 4)
    for rank, (messages, flat) in enumerate(ranks):
        near = sum(size for peer, size in messages if peer // 2 == rank // 2)
        far = sum(size for peer, size in messages if peer // 2 != rank // 2)
        assert mixed.link_bytes(layout, 4, 0)[rank] == Links(near, far)
        assert torch.equal(flat, ranks[0][1])
        exact = sum(values(layout, r, 0) for r in range(4)) / 4
        assert (flat - exact).norm() < 0.02 * exact.norm()


def test_one_rank_sends_nothing():
    assert MIXED.link_bytes(layout_of(SHAPES), 1, 0) == [Links(0, 0)]


def test_what_an_earlier_exchange_held_back_is_sent():
    layout = layout_of(SHAPES)

    def job(group):
        memory, scratch = Memory(), Scratch()
        total, sent = torch.zeros(layout.numel), torch.zeros(layout.numel)
        for step, exchange in enumerate([INT4, INT4, MIXED, MIXED, BF16]):
            flat = values(layout, group.rank, step)
            total += flat
            average(flat, exchange, Context(group, scratch, 1 / group.size, layout, memory, step))
            sent += flat
        assert not memory.named().get("residual")
        return total, sent

    ranks = run_virtual_ranks(job, 2)
    exact = (ranks[0][0] + ranks[1][0]) / 2
    p4 = slice(layout.slots[4].offset, layout.slots[5].offset)  # int2 keeps nothing back
    for _, sent in ranks:
        error = (sent - exact).abs()
        error[p4] = 0
        assert error.max() < 0.06, "16-bit and 8-bit errors of five steps; int4's would be ten times as much"
