"""Recipes that change while a run goes on: nothing that was held back is lost."""

import pickle

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Scratch, average
from gradwire.exchanges.handover import take_over_residuals
from gradwire.peers.groups import SingleRankGroup
from gradwire.testing import run_ranks
from tests.test_bridge import backward, small_model

NUM_STEPS = 9


def check_law(wire, model, sequence):
    """The sum of all results and of what is held back at the end is the sum of all means."""
    plain = small_model()
    sent, wanted = {}, {}
    for step in range(NUM_STEPS):
        if step in sequence:
            wire.swap(sequence[step])
        backward(plain, step)
        backward(model, step)
        for totals, each in ((sent, model), (wanted, plain)):
            for name, p in each.module.named_parameters():
                totals[name] = totals.get(name, 0) + p.grad.double()
    (memory,) = wire.state_dict()["memory"].values()
    for name, total in wanted.items():
        held = torch.zeros_like(total)
        for key, tensors in memory.items():
            if key.startswith("residual:") and name in tensors:
                held += tensors[name].double()
        dist.all_reduce(held)
        error = (sent[name] + held / dist.get_world_size() - total).abs().max() / total.abs().max()
        assert error < (0.02 if any("bf16" in str(each) for each in sequence.values()) else 1e-5), name
    return memory


def job_swaps(rank):
    model = small_model()
    wire = gradwire.attach(model, "int4")
    memory = check_law(wire, model, {3: "fp32", 6: "sign:feedback=true"})
    assert set(memory) == {"residual:float32"}
    wire.detach()

    model = small_model()
    with gradwire.attach(model, "sign:feedback=true") as wire:
        assert check_law(wire, model, {4: "fp32"}) == {}, "everything has been sent"
        assert wire.recipe == gradwire.fp32()

    model = small_model()
    with gradwire.attach(model, "int4") as wire:
        memory = check_law(wire, model, {4: "int4:residual=bf16"})
        assert set(memory) == {"residual:bfloat16"}

    low_rank = "powersgd:rank=1,start=0"
    other_rank = "powersgd:rank=2,start=0"
    for first, second in ((low_rank, "fp32"), ("int4", low_rank), (low_rank, "int4"), (low_rank, other_rank)):
        model = small_model()
        with gradwire.attach(model, first) as wire:
            check_law(wire, model, {4: second})

    model = small_model()
    plan = gradwire.schedule({0: "int4", 3: "fp32", 5: "int8:feedback=true"})
    with gradwire.attach(model, plan) as wire:
        check_law(wire, model, {})
        assert "schedule(0=int4; 3=fp32; 5=int8:feedback=true)" in repr(wire)

    model = small_model()
    with gradwire.attach(model, "noop") as wire:  # has no lane yet
        backward(model)
        wire.swap("fp32")
        backward(model)
        assert wire.stats().bytes_sent > 0
        before = wire.recipe
        with pytest.raises(ValueError, match="ranks call Wire.swap with different things"):
            wire.swap("int8" if rank else "int4")
        with pytest.raises(ValueError, match="no recipe 'int5'"):
            wire.swap("int5")
        assert wire.recipe is before
        backward(model)
    with pytest.raises(RuntimeError, match="detached, and swap would have no effect"):
        wire.swap("int8")


def test_nothing_is_lost_when_a_recipe_takes_over_from_another():
    run_ranks(job_swaps, 2)


def test_what_is_held_back_from_complex_parameters_is_handed_over_once():
    layout = BucketLayout(0, torch.complex64, (Slot("w", 0, torch.Size([3]), (1,)),))
    memory, flat = Memory(), torch.ones(3, dtype=torch.complex64)

    def residual(dtype=torch.float32):
        return memory.flat("residual", layout, dtype, flat.device)

    context = Context(SingleRankGroup(), Scratch(), 1.0, layout, memory, may_skip=True)
    residual().copy_(torch.arange(6.0))
    for _ in take_over_residuals(torch.view_as_real(flat).view(-1), context, torch.bfloat16):
        raise AssertionError("nothing to sum over ranks")
    assert torch.equal(residual(torch.bfloat16), torch.arange(6.0)), "complex states have one dtype"
    average(flat, gradwire.fp32().exchange, context)
    assert torch.equal(flat, torch.tensor([1 + 1j, 3 + 3j, 5 + 5j]))
    assert not memory.has("residual", layout, torch.float32)
    assert memory.state_dict() == {}


def test_a_schedule_is_a_recipe_like_any_other():
    plan = gradwire.schedule({1000: "int8", 0: "fp32", 5000: "int4:block=64,feedback=false"})
    assert gradwire.recipe(str(plan)) == plan == pickle.loads(pickle.dumps(plan))
    assert hash(gradwire.recipe(str(plan))) == hash(plan)
    assert plan.wire_bytes(1024, world_size=2) == 4096, "what its largest stage sends"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({}, "a schedule begins with step 0"),
        ({5: "fp32"}, "a schedule begins with step 0, not 5"),
        ({0: "fp32", 5: "fp16:reduction=sum"}, "must reduce alike"),
        ({0: "fp61"}, "there is no recipe 'fp61'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        gradwire.schedule(stages)


@pytest.mark.parametrize(
    "spec", ["schedule()", "schedule(fp32)", "schedule(0=fp32; 0=int8)", "schedule(x=fp32)"]
)
def test_a_schedules_text_that_cannot_be_is_refused(spec):
    with pytest.raises(ValueError, match="schedule"):
        gradwire.recipe(spec)
