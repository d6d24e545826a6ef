"""Calls of an `Averager`: weights, handles, groups, alternating lists, and its end."""

import gc
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradwire
from tests.averaged import draw, exact, require_equal, require_identical, require_near
from tests.threads import lasting_threads


def check_alternating(rank):
    with gradwire.Averager("int4") as averager:
        first, second = {"a": (300,), "b": (5, 7)}, {"b": (5, 7), "c": (9,)}
        keys = []
        for step in range(12):
            shapes = (first, second, {"c": (9,)})[step % 3]
            averager.average_(tensors := draw(rank, step, shapes=shapes))
            require_identical(tensors)
            saved = averager.state_dict()
            keys.append([name for _, name, _ in saved["entries"]])
            assert saved["layouts"] == [], "no grouping is kept"
        assert keys[2:] == [["a", "b", "c"]] * 10
        assert len(averager._packings._kept) == 3
        for count in range(100):
            averager.average_({f"tensor{count % 70}": torch.ones(3)})
        assert len(averager._packings._kept) == 64


def test_calls_with_other_names_alternate_without_growing_state(two_ranks):
    two_ranks.run(check_alternating)


def check_weights(rank, spec):
    size, step = dist.get_world_size(), 0
    with gradwire.Averager(spec) as averager:
        numbers = [[3, 1, 2], [0, 5, 0.5], [1e-3, 2e3, 7], np.array([3, 1, 2], np.float32)]
        for weights in (each[:size] for each in numbers):
            tensors = draw(rank, step)
            if weights[rank] == 0:
                tensors["bias"].fill_(float("nan"))  # does not count
            averager.average_(tensors, weight=weights[rank])
            require_near(tensors, exact(step, weights=weights), 1e-6 if spec == "fp32" else 0.4)
            require_identical(tensors)
            step += 1
        averager.average_(weighted := draw(rank), weight=7)
        averager.average_(plain := draw(rank))
        require_equal(weighted, plain)
        half = draw(rank, dtype=torch.float16)["weight"].clamp(-1, 1) * 3e4
        averager.average_(half, weight=1000 + rank)
        assert half.isfinite().all(), "a weight makes nothing overflow"


@pytest.mark.parametrize(
    "spec", ["fp32", "bf16", "int8", "int4:feedback=false", "route(ndim<2=fp32; *=fp16)"]
)
def test_weighted_means(spec, three_ranks):
    three_ranks.run(check_weights, spec)


def check_refused_weights(rank, spec, weight, error, text):
    with gradwire.Averager(spec) as averager:
        with pytest.raises(gradwire.WireError, match=text) as caught:
            averager.average_(torch.ones(3), weight=weight)
        assert isinstance(caught.value, error)


@pytest.mark.parametrize(
    ("spec", "weight", "error", "text"),
    [
        ("int4", 1, ValueError, "int4 cannot take weights: its feedback adds"),
        ("powersgd", 1, ValueError, "powersgd cannot take weights"),
        ("fp32:reduction=sum", 1, ValueError, "it takes sums"),
        ("fp32", -1, ValueError, "weight must be 0, or from 1e-100 to 1e\\+100, not -1"),
        ("fp32", float("nan"), ValueError, "not nan"),
        ("fp32", 1e308, ValueError, "not 1e\\+308"),
        ("fp32", 1e-320, ValueError, "not 1e-320"),
        ("fp32", torch.tensor(2.0), TypeError, "give its .item()"),
        ("fp32", "3", TypeError, "weight is a number, not '3'"),
        ("fp32", 0, ValueError, "the weights of all ranks are 0"),
    ],
)
def test_weights_that_cannot_be_are_refused(spec, weight, error, text, two_ranks):
    two_ranks.run(check_refused_weights, spec, weight, error, text)


def check_weight_after_swap(rank):
    with gradwire.Averager("int4") as averager:
        averager.average_(draw(rank))
        averager.swap("fp32")
        averager.average_({"other": torch.ones(3)}, weight=1)
        with pytest.raises(ValueError, match="an earlier recipe has held back a part of"):
            averager.average_(draw(rank), weight=1)
    with gradwire.Averager("int4") as averager:
        averager.average_(draw(rank))
        averager.swap("fp32")
        averager.average_(draw(rank))
        averager.average_(draw(rank), weight=1)


def test_what_feedback_has_held_back_is_sent_before_weights_are_taken(two_ranks):
    two_ranks.run(check_weight_after_swap)


def check_handles(rank, spec):
    want = [draw(rank, step) for step in range(6)]
    with gradwire.Averager(spec) as averager:
        for tensors in want:
            averager.average_(tensors)
        state = averager.state_dict()
    with gradwire.Averager(spec) as averager:
        have = [draw(rank, step) for step in range(6)]
        handles = [averager.start(tensors) for tensors in have]  # share names
        for handle in reversed(handles) if rank else handles:
            handle.wait()
            handle.wait()
            assert handle.done()
        for each, other in zip(have, want, strict=True):
            require_equal(each, other)
        memory, other = (each["memory"][f"rank{rank}"] for each in (averager.state_dict(), state))
        for key in other:
            require_equal(memory[key], other[key])
        assert sorted(step.step for step in averager.stats().steps) == list(range(6))
        handles = [averager.start({f"{step}": torch.full((50,), 1.0 * rank)}) for step in range(8)]
        for handle in handles:
            handle.wait()


@pytest.mark.parametrize("spec", ["fp32", "int4", "powersgd:rank=2"])
def test_averagings_under_way_together_have_the_bits_of_one_after_the_other(spec, two_ranks):
    two_ranks.run(check_handles, spec)


def check_subgroups(rank):
    halves = [dist.new_group([0, 2]), dist.new_group([1])]
    ranks = [0, 2] if rank != 1 else [1]
    with gradwire.Averager("fp32", halves[rank == 1]) as averager, gradwire.Averager("bf16") as world:
        averager.average_(tensors := draw(rank))
        require_near(tensors, exact(ranks=ranks), 1e-6)
        world.average_(tensors := draw(rank))
        require_near(tensors, exact(), 0.05)
        averager.average_(tensors := draw(rank), weight=1 + rank)
        require_near(tensors, exact(ranks=ranks, weights=[1 + each for each in ranks]), 1e-6)
    if rank == 1:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            gradwire.Averager(group=dist.GroupMember.NON_GROUP_MEMBER)
    else:  # errors name ranks of the world
        averager = gradwire.Averager("fp32", halves[0])
        found = rf"^rank {rank}, .* \(3,\), float32 on rank\(s\) 0, .* \(5,\), float32 on rank\(s\) 2"
        with pytest.raises(ValueError, match=found) as caught:
            averager.average_(torch.ones(3 + rank))
        averager.close()
        averager.close()
        assert str(averager.failure) == str(caught.value)


def test_an_averager_takes_any_group(three_ranks):
    three_ranks.run(check_subgroups)


def check_disabled(rank):
    os.environ["GRADWIRE_DISABLE"] = "1"
    try:
        with gradwire.Averager("sign") as averager:
            averager.average_(tensors := draw(rank))
            require_near(tensors, exact(), 1e-6)
            averager.average_(tensors := draw(rank, dtype=torch.complex64))
            require_near(tensors, exact(dtype=torch.complex64), 1e-6)
            averager.swap("fp32")
            averager.start(tensors := draw(rank), weight=rank).wait()
            require_near(tensors, exact(weights=[0, 1]), 1e-6)
            for weight in (None, 1000 + rank):
                averager.average_(half := torch.full((3,), 6e4, dtype=torch.float16), weight)
                assert torch.allclose(half.float(), torch.tensor(6e4), rtol=1e-3), "nothing overflows"
            with pytest.raises(ValueError, match="the weights of all ranks are 0"):
                averager.average_(draw(rank), weight=0)
            averager.load_state_dict(averager.state_dict())
            assert averager.stats().bytes_sent is None
    finally:
        del os.environ["GRADWIRE_DISABLE"]


def test_torch_averages_if_gradwire_is_disabled(two_ranks):
    two_ranks.run(check_disabled)


def check_lifetime(rank):
    before = len(lasting_threads())
    averager = gradwire.Averager("int4")
    averager.average_(draw(rank))
    handle = averager.start(draw(rank))
    handle.wait()
    assert len(lasting_threads()) > before
    dist.barrier()
    assert averager._in_flight == [], "it holds no tensors of calls that are over"
    del averager, handle
    gc.collect()
    assert len(lasting_threads()) == before
    with gradwire.Averager() as averager:
        assert "over 2 ranks" in repr(averager)
        dist.barrier()
    assert len(lasting_threads()) == before
    assert averager.failure is None
    averager.close()
    for call in (lambda: averager.average_(torch.ones(1)), lambda: averager.swap("fp32")):
        with pytest.raises(RuntimeError, match="this averager is closed"):
            call()


def test_dropping_or_closing_an_averager_ends_its_threads(two_ranks):
    two_ranks.run(check_lifetime)
