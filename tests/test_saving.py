"""States that are saved after the model is gone, on one rank alone, or at a time when they are torn."""

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.averaging import Grid, checkpoint
from gradwire.averaging.gathering import gather_states
from tests.models import backward, small_model
from tests.resumed_runs import through_a_file


def check_outliving(rank):
    model = small_model()
    wire = gradwire.attach(model, "int4")
    backward(model)
    before, gone = wire.state_dict(), weakref.ref(model)
    num_bytes = wire.stats().bytes_sent
    del model
    gc.collect()
    assert gone() is None
    state = wire.state_dict()
    assert state["step"] == 1
    assert state["entries"] == before["entries"]
    assert wire.state_dict(gather=True)["memory"].keys() == {"rank0", "rank1"}
    assert wire.stats().bytes_sent == num_bytes
    assert wire.layout()
    for use in (
        lambda: wire.model,
        lambda: wire.swap("int8"),
        lambda: wire.load_state_dict(state),
        lambda: gradwire.overlap_optimizer(wire, torch.optim.Adam),
    ):
        with pytest.raises(RuntimeError, match=r"exists no more; state_dict and stats .* keep a reference"):
            use()
    wire.checkpoint_template(Metadata())
    repr(wire)
    wire.detach()


class Metadata:
    """The part of a checkpoint's metadata that a template needs."""

    state_dict_metadata = {"wire.step": None}  # noqa: RUF012


def test_a_wire_that_outlives_its_model_can_be_saved_and_says_what_else_needs_the_model(two_ranks):
    two_ranks.run(check_outliving)


def check_one_file(rank):
    model = small_model()
    with gradwire.attach(model, "int4") as wire:
        for seed in range(3):
            backward(model, seed)
        own, of_all = wire.state_dict(), through_a_file(wire.state_dict(gather=True))
        assert of_all["memory"].keys() == {"rank0", "rank1"}
        residuals = own["memory"][f"rank{rank}"]["residual:float32"]
        backward(model)
        wire.load_state_dict(of_all)
        loaded = wire.state_dict()["memory"][f"rank{rank}"]["residual:float32"]
        assert all(torch.equal(loaded[name], residuals[name]) for name in residuals)
        of_rank_0 = {**of_all, "memory": {"rank0": of_all["memory"]["rank0"]}}
        with pytest.raises(
            ValueError, match=r"no 'rank1', only .*save what state_dict\(gather=True\) returns"
        ):
            wire.load_state_dict(of_rank_0)


def test_one_rank_can_save_the_gathered_state_for_all(two_ranks):
    two_ranks.run(check_one_file)


def check_one_file_of_local_sgd(rank):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.LocalSGD(model, optimizer, period=2, warmup_steps=1, recipe="int4") as local:
        for seed in range(4):
            backward(model, seed)
            optimizer.step()
            local.step()
        own, of_all = local.state_dict(), through_a_file(local.state_dict(gather=True))
        local.load_state_dict(of_all)
        key = f"rank{rank}"
        mine = local.state_dict()["averaging"]["memory"][key]["residual:float32"]
        for name, residual in own["averaging"]["memory"][key]["residual:float32"].items():
            assert torch.equal(mine[name], residual)


def test_so_can_one_rank_of_local_sgd(two_ranks):
    two_ranks.run(check_one_file_of_local_sgd)


def check_torn(rank):
    model = small_model()
    with gradwire.attach(model, "int4") as wire:
        backward(model)
        caught = []

        def save(parameter):
            with pytest.raises(
                RuntimeError, match=r"Wire.state_dict was called inside backward\(\)"
            ) as error:
                wire.state_dict()
            caught.append(error)

        hook = next(model.parameters()).register_post_accumulate_grad_hook(save)
        backward(model)
        hook.remove()
        assert len(caught) == 1
        assert wire.state_dict()["step"] == 2


def test_a_state_is_not_saved_inside_backward(two_ranks):
    two_ranks.run(check_torn)


def gather_a_state_of_many_kinds(rank):
    memory = {
        "residual:float32": {
            "turned": torch.randn(3, 4).t(),
            "none": torch.zeros(0, 3),
            "one": torch.tensor(2.5),
        },
        "residual:bfloat16": {"half": torch.randn(5).bfloat16()},
        "residual:complex64": {"complex": torch.randn(3, dtype=torch.complex64).expand(2, 3).t()},
    }
    own = checkpoint.write("int4", 7, (), memory, rank, Grid(2), 0.5)
    gathered = gather_states(own, dist.group.WORLD, timedelta(seconds=60), "a test")
    assert gathered["memory"].keys() == {"rank0", "rank1"}
    assert {key: value for key, value in gathered.items() if key != "memory"} == {
        key: value for key, value in own.items() if key != "memory"
    }
    found = gathered["memory"][f"rank{rank}"]
    assert found.keys() == memory.keys()
    for key, tensors in memory.items():
        for name, tensor in tensors.items():
            assert torch.equal(found[key][name], tensor)
            assert found[key][name].dtype == tensor.dtype


def test_gathered_states_keep_every_bit_and_dtype(two_ranks):
    two_ranks.run(gather_a_state_of_many_kinds)
