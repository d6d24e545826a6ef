"""States of local SGD: they go on bit for bit, and are loaded on all ranks or on none."""

import io
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.testing import run_ranks
from gradwire.training import local_sgd, membership
from tests.local_runs import flat, loss_of, net
from tests.threads import lasting_threads


def job_checkpoint(rank):
    def make():
        model = DistributedDataParallel(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer

    def options():
        return {
            "period": 3,
            "warmup_steps": 2,
            "recipe": "int4",  # has residuals to go on with
            "outer": gradwire.SlowMo(),
        }

    def train(model, optimizer, local, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            local.step()

    for saved_after in (1, 5, 6):  # in the warm-up, at an averaging, between two
        model, optimizer = make()
        with gradwire.LocalSGD(model, optimizer, **options()) as local:
            train(model, optimizer, local, range(saved_after))
            saved = io.BytesIO()
            torch.save([model.module.state_dict(), optimizer.state_dict(), local.state_dict()], saved)
            kept = local.state_dict()
            train(model, optimizer, local, range(saved_after, 11))
        saved.seek(0)
        weights, optimizer_state, local_state = torch.load(saved, weights_only=True)
        for kind in ("start", "momentum"):  # steps that follow change no state that is kept
            assert all(torch.equal(kept[kind][name], own) for name, own in local_state[kind].items())
        resumed, resumed_optimizer = make()
        resumed.module.load_state_dict(weights)
        resumed_optimizer.load_state_dict(optimizer_state)
        with gradwire.LocalSGD(resumed, resumed_optimizer, **options()) as local:
            # Making it has set all ranks to one start; each rank has a place of its own.
            resumed.module.load_state_dict(weights)
            local.load_state_dict(local_state)
            train(resumed, resumed_optimizer, local, range(saved_after, 11))
        assert torch.equal(flat(model), flat(resumed)), saved_after

    other = DistributedDataParallel(nn.Linear(3, 3))
    with (
        gradwire.LocalSGD(other, torch.optim.SGD(other.parameters(), lr=0.1), period=2) as local,
        pytest.raises(ValueError, match="does not fit: it differs in"),
    ):
        local.load_state_dict(local_state)


def test_a_checkpoint_goes_on_bit_for_bit():
    run_ranks(job_checkpoint, 2)


def trained_for(num_steps, group=None, recipe="int4", rank=0):
    model = DistributedDataParallel(net(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = gradwire.LocalSGD(
        model, optimizer, period=2, warmup_steps=2, recipe=recipe, outer=gradwire.DiLoCo()
    )
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        local.step()
    return local


def figures(local):
    """All that a load may change."""
    state = local.state_dict()
    kept = {key: dict(state[key]) for key in ("start", "momentum")}
    return (
        state["num_steps"],
        kept,
        local._membership.gradients.wire,
        local._membership.gradients.wire.attached,
        str(local._membership.gradients.wire.recipe),
        state["wire"]["step"],
    )


def same(one, other):
    parts = [(one[1][key], other[1][key]) for key in one[1]]
    tensors = all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in parts)
    return tensors and (one[0], *one[2:]) == (other[0], *other[2:])


def job_bad_states(rank):
    """A state that does not fit on one rank is loaded on none."""
    donor = trained_for(4, rank=rank)
    good = donor.state_dict()
    donor.detach()
    for num_steps in (0, 4):  # with another wire than the state's, and with the same
        local = trained_for(num_steps, rank=rank)
        before = figures(local)

        def part(key, **changes):
            return {**good, key: {**good[key], **changes}}

        for bad, text in (
            ({}, "no state of a LocalSGD: it has no 'num_steps'"),
            (part("averaging", version=1), "version 1"),
            (part("averaging", memory={}), "has no 'rank1'"),
            (part("wire", version=1), "version 1"),
            (part("wire", layouts=[[0, [["float32", ["no such"]]]]]), "a parameter 'no such'"),
            (part("start", **{"0.bias": torch.zeros(1)}), "differs in .'0.bias'"),
            ({**good, "num_steps": "many"}, "many"),
        ):
            with pytest.raises(ValueError, match=text) as caught:
                local.load_state_dict(bad if rank else good)
            assert rank or "LocalSGD.load_state_dict failed on rank 1" in str(caught.value)
            assert same(before, figures(local)), text
        with pytest.raises(ValueError, match="the saved step is 4 on"):
            local.load_state_dict({**good, "num_steps": 4 + rank})
        assert same(before, figures(local))
        local.load_state_dict(good)
        assert local.num_steps == 4
        local.detach()


def job_fewer_ranks(rank):
    """Saved on two ranks, loaded on one; each rank for itself."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for recipe, num_steps, part in (("bf16", 5, None), ("int4", 5, "averaging"), ("int4", 1, "wire")):
        local = trained_for(num_steps, recipe=recipe, rank=rank)
        state = local.state_dict()
        local.detach()
        everyone = [None, None]
        dist.all_gather_object(everyone, state)
        resumed = trained_for(0, group=alone, recipe=recipe)
        if part is not None:
            with pytest.raises(ValueError, match=f"merge_state_dicts of every rank's {part!r}"):
                resumed.load_state_dict(state)
            state[part] = gradwire.merge_state_dicts([each[part] for each in everyone])
        resumed.load_state_dict(state)
        assert resumed.num_steps == num_steps
        assert all(torch.equal(v, state["start"][n]) for n, v in resumed.state_dict()["start"].items())
        resumed.detach()


def job_nothing_left(rank):
    """A run that cannot begin leaves the model as it was; with GRADWIRE_DISABLE nothing is opened."""

    def fail(*args, **options):
        raise OSError("no more sockets")

    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for module, name in ((membership, "open_engine"), (local_sgd, "make_fragments")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no more sockets"):
            patch.setattr(module, name, fail)
            gradwire.LocalSGD(model, optimizer, period=1)
        assert not lasting_threads()
    os.environ["GRADWIRE_DISABLE"] = "1"
    with gradwire.LocalSGD(model, optimizer, period=1) as local:
        assert not lasting_threads()
        loss_of(model, rank, 0).backward()
        assert not local.step()
        local.average()
        local.load_state_dict(local.state_dict())
        assert (local.num_steps, local.stats().num_steps) == (1, 0)
    del os.environ["GRADWIRE_DISABLE"]
    with gradwire.attach(model, "fp32"):
        loss_of(model, rank, 0).backward()


def job_states(rank):
    job_bad_states(rank)
    job_fewer_ranks(rank)
    job_nothing_left(rank)


def test_a_state_is_loaded_on_all_ranks_or_on_none_and_what_fails_leaves_nothing():
    run_ranks(job_states, 2)
