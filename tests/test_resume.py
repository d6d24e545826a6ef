"""Resumed runs are, bit for bit, those that were not stopped."""

import copy
import io
import pickle
import random

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.averaging import Grid, checkpoint
from gradwire.averaging.regroup import Timeline
from gradwire.testing import run_ranks
from tests.resumed_runs import NUM_STEPS, flat, make, random_spec, resume, run_whole, snapshot, train
from tests.rows import ROWS

SPECS = [row.spec for row in ROWS if 2 in row.world_sizes] + [
    "int4:residual=bf16,rounding=stochastic",
    "schedule(0=int4; 2=fp32; 4=sign:feedback=true)",
    "route(*.bias=schedule(0=fp32; 3=int4); *=int4:rounding=stochastic)",
]
GRAPHS = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


def job_resume(rank, specs, seed):
    for number, spec in enumerate(specs):
        check_resume(rank, spec, f"{seed} {number}")


def check_resume(rank, spec, seed, num_stops=4):
    choice = random.Random(seed)
    options = GRAPHS[choice.randrange(len(GRAPHS))]
    whole, saved = run_whole(spec, **options)
    for stopped_at in choice.sample(range(NUM_STEPS), num_stops):
        model, optimizer, wire = resume(spec, saved[stopped_at], **options)
        # Stopped a second time, and resumed; not before it has seen what DDP rebuilds, if nobody had.
        num_unseen = 2 if stopped_at <= 2 else 0
        again = choice.choice([stopped_at, *range(stopped_at + num_unseen + 1, NUM_STEPS + 1)])
        with wire:
            train(model, optimizer, range(stopped_at, again))
            second = snapshot(model, optimizer, wire)
        assert wire.stats().num_steps == again - stopped_at
        model, optimizer, wire = resume(spec, second, **options)
        with wire:
            train(model, optimizer, range(again, NUM_STEPS))
        assert torch.equal(flat(model), whole), (spec, options, stopped_at, again)


@pytest.mark.parametrize("spec", SPECS)
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_stopped(spec, two_ranks):
    two_ranks.run(check_resume, spec, f"2 {spec}", 2)


@pytest.mark.full
@pytest.mark.parametrize("spec", SPECS)
def test_so_is_one_that_was_stopped_at_more_steps(spec, two_ranks):
    two_ranks.run(check_resume, spec, f"more {spec}", NUM_STEPS)


def check_any_recipe_resumes(seed, world_size, num_specs):
    choice = random.Random(f"{seed} {world_size}")
    specs = [random_spec(choice) for _ in range(num_specs)]
    run_ranks(job_resume, world_size, timeout=240, args=(specs, seed))


@pytest.mark.parametrize("world_size", [1, 3])
def test_so_is_one_with_any_recipe_stopped_at_any_step(world_size):
    check_any_recipe_resumes(0, world_size, num_specs=3)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(1, 6))
def test_so_is_one_with_any_of_many_recipes(seed, world_size):
    check_any_recipe_resumes(seed, world_size, num_specs=8)


def test_a_layout_changes_at_the_same_step_whenever_a_run_was_resumed():
    first, rebuilt = (("float32", ("a", "b")),), (("float32", ("b",)), ("float32", ("a",)))
    for num_transient in (1, 2, 3):

        def used(timeline, steps, run_start, num_transient=num_transient):
            for step in steps:
                arriving = first if step < run_start + num_transient else rebuilt
                yield timeline.at(step) or arriving
                timeline.arrived(step, arriving)

        whole = list(used(Timeline(num_transient), range(12), 0))
        for stop in range(12):
            timeline = Timeline(num_transient)
            assert list(used(timeline, range(stop), 0)) == whole[:stop]
            resumed = Timeline(num_transient)
            resumed.load(stop, timeline.save(stop))
            assert list(used(resumed, range(stop, 12), stop)) == whole[stop:], (num_transient, stop)


def test_states_of_one_run_merge_in_whatever_order_their_buckets_were_first_exchanged():
    parameters = {"first": torch.zeros(2), "second": torch.zeros(3)}
    orders = parameters, dict(reversed(parameters.items()))
    states = [
        checkpoint.write("int4", 1, [], {"residual:float32": own}, rank, Grid(2))
        for rank, own in enumerate(orders)
    ]
    assert gradwire.merge_state_dicts(states)["memory"].keys() == {"rank0", "rank1"}
    with pytest.raises(TypeError, match="takes the states of all ranks, as a list, not one state"):
        gradwire.merge_state_dicts(states[0])


def check_frozen_later():
    """Freeze parameters after DDP has made its buckets: they stay in them, and in states."""
    saved = None
    for _ in range(2):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model = DistributedDataParallel(net, find_unused_parameters=True)
        net[0].requires_grad_(False)
        with gradwire.attach(model, "int4") as wire:
            if saved is not None:
                wire.load_state_dict(saved)
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
            saved = wire.state_dict()
            model(torch.ones(2, 3)).sum().backward()
            wire.load_state_dict(saved)
            assert wire.stats().num_steps == 4, "a step that is taken back was sent all the same"
    assert saved["step"] == 6


def job_refusals(rank):
    model, optimizer, wire = make("int4")
    train(model, optimizer, range(2))
    good = wire.state_dict()
    own = f"rank{rank}"

    def damaged(change):
        state = copy.deepcopy(good)
        change(state)
        return state

    def pop(state):
        del state["memory"][own]["residual:float32"]["conv.weight"]

    def add(state):
        state["memory"][own]["residual:float32"]["conv.wait"] = torch.zeros(3)

    def reshape(state):
        state["memory"][own]["residual:float32"]["conv.bias"] = torch.zeros(5)

    def old(state):
        state.update(version=1)
        del state["loss_scale"]

    cases = {
        "has no residual:float32 of parameter 'conv.weight', which was saved": pop,
        "has a residual:float32 of parameter 'conv.wait' that was not saved": add,
        r"parameter 'conv.bias' of rank \d has shape \(5,\), but was saved with shape \(6,\)": reshape,
        "it has no 'step'": lambda state: state.pop("step"),
        "it has an unknown 'steps'": lambda state: state.update(steps=3),
        "version 99, and this gradwire reads version 2": lambda state: state.update(version=99),
        "has version 3, ": lambda state: state.update(version=3, lanes=2),
        "has version 1, ": old,
        f"has no '{own}'": lambda state: state["memory"].clear(),
    }
    for text, change in cases.items():
        with pytest.raises(ValueError, match=text):
            wire.load_state_dict(damaged(change))
    # A state that is bad on one rank alone is an error on all, and on nobody loaded.
    with pytest.raises((ValueError, RuntimeError), match="it has no 'step'"):
        wire.load_state_dict(damaged(lambda state: state.pop("step") if rank == 1 else None))
    with pytest.raises(
        ValueError, match=r"ranks call Wire.load_state_dict with different things: the saved step is "
    ):
        wire.load_state_dict(damaged(lambda state: state.update(step=2 + rank)))
    with pytest.raises(ValueError, match="they differ in 'step'"):
        gradwire.merge_state_dicts([good, {**good, "step": 9}])
    with pytest.raises(ValueError, match="is there twice"):
        gradwire.merge_state_dicts([good, good])

    other = DistributedDataParallel(nn.Linear(3, 3))
    with (
        gradwire.attach(other, "int4") as others,
        pytest.raises(ValueError, match="has a parameter 'conv.bias', which this model has not"),
    ):
        others.load_state_dict(good)
    wider = DistributedDataParallel(nn.Linear(3, 4))
    with gradwire.attach(other, "int4") as others, gradwire.attach(wider, "int4") as wide:
        other(torch.ones(2, 3)).sum().backward()
        with pytest.raises(ValueError, match=r"'bias' with shape \(3,\), .* has shape \(4,\)"):
            wide.load_state_dict(others.state_dict())
    with pytest.raises(RuntimeError, match="detached, and load_state_dict would have no effect"):
        others.load_state_dict(good)
    check_frozen_later()
    after = wire.state_dict()
    assert after["memory"][own]["residual:float32"].keys() == good["memory"][own]["residual:float32"].keys()
    train(model, optimizer, range(2, 4))


def test_a_state_that_does_not_fit_is_refused_and_the_entry_named():
    run_ranks(job_refusals, 2)


def job_half_a_file(rank):
    model, optimizer, wire = make("int4")
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save(wire.state_dict(), file)
    whole = file.getvalue()
    for part in (0, 1, len(whole) // 2, len(whole) - 1):
        with pytest.raises((RuntimeError, EOFError, ValueError, pickle.UnpicklingError)):
            wire.load_state_dict(torch.load(io.BytesIO(whole[:part]), weights_only=True))


def test_a_half_written_file_never_loads():
    run_ranks(job_half_a_file, 1)
