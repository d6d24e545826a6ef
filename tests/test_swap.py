"""Recipes that change while a run goes on: nothing that was held back is lost."""

import pickle

import pytest
import torch

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Scratch, average
from gradwire.exchanges.residuals import migrate_residuals
from gradwire.peers.groups import SingleRankGroup
from tests.conservation import check_nothing_is_lost
from tests.models import backward, small_model

LOW_RANK = "powersgd:rank=1,start=0"
# The first recipe, those that take over by step, and the states that are left at the end, if that is known.
SWAPS = {
    "feedback, none, feedback": ("int4", {3: "fp32", 6: "sign:feedback=true"}, {"residual:float32"}),
    "to none": ("sign:feedback=true", {4: "fp32"}, set()),
    "to residuals of bf16": ("int4", {4: "int4:residual=bf16"}, {"residual:bfloat16"}),
    "from low rank": (LOW_RANK, {4: "fp32"}, None),
    "to low rank": ("int4", {4: LOW_RANK}, None),
    "from low rank to blocks": (LOW_RANK, {4: "int4"}, None),
    "to another rank": (LOW_RANK, {4: "powersgd:rank=2,start=0"}, None),
    "to another momentum": (
        "topk:keep=8,block=256,momentum=0.9",
        {4: "topk:keep=8,block=256,momentum=0.5", 7: "int4:momentum=0.9"},
        {"residual:float32", "velocity:float32"},
    ),
    "to velocities of bf16": (
        "int4:momentum=0.9",
        {4: "int4:residual=bf16,momentum=0.9"},
        {"residual:bfloat16", "velocity:bfloat16"},
    ),
    "from a momentum to none": ("topk:keep=8,block=256,momentum=0.9", {4: "fp32"}, set()),
    "by schedule": ("schedule(0=int4; 3=fp32; 5=int8:feedback=true)", {}, None),
}


def check_swaps(rank, name):
    first, swaps, left = SWAPS[name]
    model = small_model()
    with gradwire.attach(model, first) as wire:
        memory = check_nothing_is_lost(wire, model, swaps)
        assert left is None or set(memory) == left
        last = gradwire.recipe([first, *swaps.values()][-1])
        assert wire.recipe == last
        assert str(last) in repr(wire)


@pytest.mark.parametrize("name", SWAPS)
def test_nothing_is_lost_when_a_recipe_takes_over_from_another(name, two_ranks):
    two_ranks.run(check_swaps, name)


def check_swap_from_noop(rank):
    model = small_model()
    with gradwire.attach(model, "noop") as wire:  # has no lane yet
        backward(model)
        wire.swap("fp32")
        backward(model)
        assert wire.stats().bytes_sent > 0


def test_a_recipe_that_communicates_takes_over_from_one_that_does_not(two_ranks):
    two_ranks.run(check_swap_from_noop)


def check_refused_swap(rank):
    model = small_model()
    with gradwire.attach(model, "fp32") as wire:
        before = wire.recipe
        with pytest.raises(ValueError, match="ranks call Wire.swap with different things"):
            wire.swap("int8" if rank else "int4")
        with pytest.raises(ValueError, match="no recipe 'int5'"):
            wire.swap("int5")
        assert wire.recipe is before
        backward(model)
    with pytest.raises(RuntimeError, match="detached, and swap would have no effect"):
        wire.swap("int8")


def test_a_swap_that_is_refused_changes_nothing(two_ranks):
    two_ranks.run(check_refused_swap)


def test_what_is_held_back_from_complex_parameters_is_handed_over_once():
    layout = BucketLayout(0, torch.complex64, (Slot("w", 0, torch.Size([3]), (1,)),))
    memory, flat = Memory(), torch.ones(3, dtype=torch.complex64)

    def residual(dtype=torch.float32):
        return memory.flat("residual", layout, dtype, flat.device)

    context = Context(SingleRankGroup(), Scratch(), 1.0, layout, memory, may_have_unused=True)
    residual().copy_(torch.arange(6.0))
    for _ in migrate_residuals(torch.view_as_real(flat).view(-1), context, torch.bfloat16):
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


@pytest.mark.parametrize("start", [0.5, "5", True])
def test_a_stage_that_begins_with_no_step_is_refused(start):
    with pytest.raises(TypeError, match=f"begins with a step, a whole number, not {start!r}"):
        gradwire.schedule({0: "fp32", start: "int8"})


@pytest.mark.parametrize(
    "spec",
    ["schedule()", "schedule(fp32)", "schedule(0=fp32; 0=int8)", "schedule(x=fp32)", "schedule(²=fp32)"],
)
def test_a_schedules_text_that_cannot_be_is_refused(spec):
    with pytest.raises(ValueError, match="schedule"):
        gradwire.recipe(spec)
