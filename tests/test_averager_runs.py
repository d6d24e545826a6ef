"""Runs of an `Averager`: resumed, on other numbers of ranks, with other recipes, and with failures."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.testing import run_ranks
from tests.averaged import SHAPES, draw, exact, require_equal, require_near

STATEFUL = ["int4", "int4:rounding=stochastic", "sign:feedback=true", "powersgd:rank=2", "acp:rank=2,start=0"]


def check_resume(rank, spec):
    with gradwire.Averager(spec) as averager:
        for step in range(3):
            averager.average_(draw(rank, step))
        state = averager.state_dict()
        handle = averager.start(want := draw(rank, 3))
        assert averager.state_dict()["step"] == 4, "it waits for what is under way"
        handle.wait()
    with gradwire.Averager(spec) as averager:
        averager.average_({"other": torch.ones(9)})
        averager.load_state_dict(state)
        averager.average_(have := draw(rank, 3))
        require_equal(have, want)
        assert averager.state_dict()["step"] == 4
        assert averager.stats().num_steps == 2


@pytest.mark.parametrize("spec", ["fp32", "schedule(0=fp32; 3=int4)", *STATEFUL])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(spec, two_ranks):
    two_ranks.run(check_resume, spec)


def check_refused_state(rank):
    with gradwire.Averager("int4") as averager:
        averager.average_(draw(rank))
        state = averager.state_dict()
        with pytest.raises(ValueError, match="different things: the saved step is"):
            averager.load_state_dict({**state, "step": rank})
        with pytest.raises((ValueError, RuntimeError), match="this is no state of a wire"):
            averager.load_state_dict({} if rank else state)
        averager.average_(draw(rank))
        averager.load_state_dict(state)
        with pytest.raises(ValueError, match=r"parameter bias had shape \(33,\) and now has \(34,\)"):
            averager.average_({"bias": torch.ones(34)})


def test_a_state_that_does_not_fit_is_refused_on_every_rank(two_ranks):
    two_ranks.run(check_refused_state)


def average_and_save(rank, spec):
    with gradwire.Averager(spec) as averager:
        averager.average_(tensors := draw(rank))
        return averager.state_dict(), tensors


def load_and_average(rank, state):
    with gradwire.Averager("fp32") as averager:
        averager.load_state_dict(state)
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        averager.average_(zeros)
        return zeros


def refuse_to_load(rank, state):
    with gradwire.Averager("int4") as averager, pytest.raises(ValueError, match="merge_state_dicts"):
        averager.load_state_dict(state)


def test_on_another_number_of_ranks_nothing_is_lost():
    states, (sent, *_) = zip(*run_ranks(average_and_save, 3, args=("int4",)), strict=True)
    late = run_ranks(load_and_average, 2, args=(gradwire.merge_state_dicts(states),))[0]
    terms = [draw(rank) for rank in range(3)]
    for name, have in sent.items():
        want = sum(term[name].double() for term in terms) / 3
        assert torch.allclose(have.double() + late[name], want, atol=1e-5), name
    run_ranks(refuse_to_load, 2, args=(states[0],))


def check_swaps(rank, first, second):
    size = dist.get_world_size()
    with gradwire.Averager(first) as averager:
        sent = dict.fromkeys(SHAPES, 0.0)
        for step in range(4):
            if step == 2:
                averager.swap(second)
                assert averager.recipe == gradwire.recipe(second)
            averager.average_(tensors := draw(rank, step))
            sent = {name: sent[name] + tensors[name].double() for name in SHAPES}
        memory = averager.state_dict()["memory"][f"rank{rank}"]
        for key, own in memory.items():
            if key.startswith("residual"):
                for name, left in own.items():
                    dist.all_reduce(total := left.double())
                    sent[name] = sent[name] + total / size
        due = {name: sum(exact(step)[name] for step in range(4)) for name in SHAPES}
        require_near(sent, due, 1e-4)


@pytest.mark.parametrize("second", ["fp32", "int8:feedback=true", "powersgd:rank=1,start=0"])
def test_nothing_is_lost_when_a_recipe_takes_over(second, two_ranks):
    two_ranks.run(check_swaps, "int4", second)


def check_refused_swap(rank):
    with gradwire.Averager("noop") as averager:
        averager.average_(tensors := draw(rank))
        require_equal(tensors, draw(rank))
        with pytest.raises(ValueError, match="ranks call Averager.swap with different things"):
            averager.swap("int8" if rank else "int4")
        with pytest.raises(ValueError, match="2 ranks cannot be nodes of 3"):
            averager.swap("int8:local_size=3")
        no_lane = mock.patch("gradwire.loops.averager.open_lane", side_effect=RuntimeError("unreachable"))
        with no_lane, pytest.raises(RuntimeError, match="unreachable"):
            averager.swap("int8")
        assert str(averager.recipe) == "noop"
        averager.swap("fp32")
        averager.average_(tensors := draw(rank))
        require_near(tensors, exact(), 1e-6)


def test_a_swap_that_is_refused_changes_nothing(two_ranks):
    two_ranks.run(check_refused_swap)


def check_refused_arguments(rank):
    for arguments, error, text in [
        ({"recipe": "int5"}, ValueError, "there is no recipe 'int5'"),
        ({"recipe": "int8" if rank else "int4"}, ValueError, "ranks call gradwire.Averager with different"),
        ({"device": "meta"}, ValueError, "on cpu and cuda, not on meta"),
        ({"timeout": 3}, TypeError, "timeout must be a datetime.timedelta, not 3"),
        ({"group": 3}, TypeError, "group is a process group, not 3"),
        (
            {"recipe": torch.nn.Linear(2, 2), "group": "int4"},
            TypeError,
            r"not 'int4'; write Averager\(recipe, ",
        ),
        ({"group": torch.nn.Linear(2, 2)}, TypeError, "group is a process group, not Linear; "),
    ]:
        with pytest.raises(error, match=text):
            gradwire.Averager(**arguments)
    with gradwire.Averager() as averager, pytest.raises(ValueError, match="nothing has been averaged yet"):
        averager.plan()
    with gradwire.Averager("int8") as averager:
        assert averager.plan(torch.ones(1024)).bytes_sent == 1024 + 8


def test_arguments_that_cannot_be_are_refused_on_every_rank(two_ranks):
    two_ranks.run(check_refused_arguments)


def test_an_averager_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        gradwire.Averager()


# The tensors of rank 0, those of rank 1, and a part of the error.
DIFFERENCES = {
    "shape": ({"w": (3, 4)}, {"w": (4, 3)}, r"tensor 0 is 'w', shape \(3, 4\), float32 on rank\(s\) 0"),
    "size": ({"w": (3,)}, {"w": (4,)}, r"tensor 0 is 'w', shape \(3,\)"),
    "name": ({"v": (3,)}, {"w": (3,)}, "tensor 0 is 'v'"),
    "order": ({"v": (3,), "w": (3,)}, {"w": (3,), "v": (3,)}, "tensor 0 is 'v'"),
    "number": ({"v": (3,)}, {"v": (3,), "w": (3,)}, "number of tensors is 1 on rank"),
    "number of buckets": ({"v": (8 << 20,)}, {"v": (8 << 20,), "w": (3,)}, "number of tensors is 1 on rank"),
}


def check_difference(rank, name, spec):
    *sides, text = DIFFERENCES[name]
    with gradwire.Averager(spec) as averager:
        for shapes in sides:  # both lists are known
            averager.average_({each: torch.ones(shape) for each, shape in shapes.items()})
        with pytest.raises(ValueError, match=text) as caught:
            averager.average_({each: torch.ones(shape) for each, shape in sides[rank].items()})
        assert isinstance(averager.failure, gradwire.WireError)
        with pytest.raises(gradwire.WireError) as again:
            averager.average_(torch.ones(1))
        assert str(again.value) == str(caught.value), "it stays failed"


@pytest.mark.parametrize("name", DIFFERENCES)
def test_lists_that_differ_between_ranks_are_one_error_on_each(name, two_ranks):
    two_ranks.run(check_difference, name, "fp32")


def check_weight_on_one_rank(rank):
    with gradwire.Averager() as averager, pytest.raises(ValueError, match="weight is not given on rank"):
        averager.average_(torch.ones(3), weight=1 if rank else None)


def test_a_weight_on_one_rank_only_is_one_error_on_each(two_ranks):
    two_ranks.run(check_weight_on_one_rank)


def check_changed_shape(rank, spec):
    with gradwire.Averager(spec) as averager:
        averager.average_([torch.ones(40, 30)])
        with pytest.raises(ValueError, match=r"parameter 0 had shape \(40, 30\) and now has \(30, 40\)"):
            averager.average_([torch.ones(30, 40)])
    with gradwire.Averager("bf16") as averager:  # keeps nothing by name
        averager.average_([torch.ones(40, 30)])
        averager.average_([torch.ones(3)])


@pytest.mark.parametrize("spec", ["int4", "powersgd:rank=2,start=0"])
def test_a_shape_that_changes_is_one_error_on_every_rank(spec, two_ranks):
    two_ranks.run(check_changed_shape, spec)


WRONG = {
    "integers": (lambda: torch.ones(3, dtype=torch.int64), "has dtype torch.int64, and only floating"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "is sparse"),
    "expanded": (lambda: torch.ones(1).expand(3), "share memory"),
    "no tensor": (lambda: [None], "tensor '0' is None. If it is a gradient"),
    "a number": (lambda: 3, "not int"),
    "numbers as names": (lambda: {1: torch.ones(1)}, "names of tensors are text, not 1"),
    "a set": (lambda: {torch.ones(3)}, "a set has another order on every rank"),
    "elsewhere": (lambda: torch.ones(3, device="meta"), "is on meta.* on cpu and cuda: move it$"),
}


def check_wrong(rank, name):
    make, text = WRONG[name]
    with gradwire.Averager() as averager:
        handle = averager.start(torch.ones(3))
        handle.wait()
        given = make() if rank else torch.ones(3)
        with pytest.raises(TypeError if rank else gradwire.PeerError, match=text) as caught:
            averager.average_(given)
        assert "rank 1, step 1, bucket 0, hook fp32: TypeError" in str(caught.value)
        with pytest.raises(gradwire.WireError, match=text):
            averager.average_(torch.ones(3))
        with pytest.raises(gradwire.WireError, match=text):
            averager.load_state_dict({})


@pytest.mark.parametrize("name", WRONG)
def test_a_rank_that_refuses_its_tensors_fails_the_others(name, two_ranks):
    two_ranks.run(check_wrong, name)


def check_nothing(rank):
    with (
        gradwire.Averager() as averager,
        pytest.raises(gradwire.WireError, match="there is no tensor to average"),
    ):
        averager.average_([] if rank else torch.ones(3))


def test_an_empty_list_on_one_rank_fails_the_others(two_ranks):
    two_ranks.run(check_nothing)


def check_closed(rank):
    averager = gradwire.Averager()
    averager.average_(torch.ones(3))
    if rank:
        averager.close()
        return
    with pytest.raises(gradwire.WireError, match="rank 1"):
        averager.average_(torch.ones(3))
    averager.close()


def test_a_rank_that_leaves_fails_the_others(two_ranks):
    two_ranks.run(check_closed)


def check_failure_on_one_rank(rank):
    with gradwire.Averager("int4") as averager:
        handles = [averager.start({f"{n}": torch.ones(300)}) for n in range(4)]
        averager.start({"0": torch.ones(300)}) if rank == 0 else None
        with pytest.raises(gradwire.WireError, match="had shape|ranks do not agree"):
            averager.average_({"0": torch.ones(301)})
        for handle in handles:
            with pytest.raises(gradwire.WireError):
                handle.wait()


def test_every_handle_of_a_failed_averager_raises(two_ranks):
    two_ranks.run(check_failure_on_one_rank)
