"""States go through torch's checkpoints, and to another number of ranks."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import gradwire
from gradwire.testing import run_ranks
from tests.resumed_runs import NUM_STEPS, flat, make, random_spec, run_whole, train


def job_dcp(rank, folder):
    whole, _ = run_whole("int4")
    model, optimizer, wire = make("int4")
    with wire:
        train(model, optimizer, range(3))
        saved = wire.state_dict()
        dcp.save({"model": model.module.state_dict(), "wire": saved}, checkpoint_id=folder)
        optimizer_state = copy.deepcopy(optimizer.state_dict())
        for version, other in ((1, {"loss_scale": None}), (3, {"lanes": 2})):
            kept = {key: value for key, value in saved.items() if key not in other}
            added = {key: value for key, value in other.items() if value is not None}
            check_other_version(wire, {**kept, **added, "version": version}, f"{folder}/{version}")
    model, optimizer, wire = make("int4")
    optimizer.load_state_dict(optimizer_state)
    template = wire.checkpoint_template(dcp.FileSystemReader(folder).read_metadata())
    assert not any(t.any() for t in template["memory"][f"rank{rank}"]["residual:float32"].values())
    loaded = {"model": model.module.state_dict(), "wire": template}
    dcp.load(loaded, checkpoint_id=folder)
    mine = saved["memory"][f"rank{rank}"]["residual:float32"]
    for name, tensor in loaded["wire"]["memory"][f"rank{rank}"]["residual:float32"].items():
        assert torch.equal(tensor, mine[name]), "each rank has its own back"
    wire.load_state_dict(loaded["wire"])
    with wire:
        train(model, optimizer, range(3, NUM_STEPS))
    assert torch.equal(flat(model), whole)
    with pytest.raises(ValueError, match="no wire's state under 'wires'"):
        wire.checkpoint_template(dcp.FileSystemReader(folder).read_metadata(), "wires")
    return {name: tensor.double() for name, tensor in mine.items()}


def check_other_version(wire, state, folder):
    """Check that a state of another version, whose keys may differ, is refused for its version."""
    dcp.save({"wire": state}, checkpoint_id=folder)
    loaded = {"wire": wire.checkpoint_template(dcp.FileSystemReader(folder).read_metadata())}
    dcp.load(loaded, checkpoint_id=folder)
    with pytest.raises(ValueError, match=f"this state has version {state['version']}, "):
        wire.load_state_dict(loaded["wire"])


def job_dcp_elsewhere(rank, folder, residuals):
    model, optimizer, wire = make("int4")
    loaded = {"wire": wire.checkpoint_template(dcp.FileSystemReader(folder).read_metadata())}
    dcp.load(loaded, checkpoint_id=folder)
    wire.load_state_dict(loaded["wire"])
    check_held_back(wire, residuals, "mean")
    train(model, optimizer, range(3, 6))


def check_held_back(wire, residuals, reduction):
    """Check that these ranks hold back, together, what the saved ones did."""
    world_size = dist.get_world_size()
    (mine,) = wire.state_dict()["memory"].values()
    for name, tensor in mine["residual:float32"].items():
        total = tensor.double()
        dist.all_reduce(total)
        saved = sum(each[name] for each in residuals)
        if reduction == "mean":
            total, saved = total / world_size, saved / len(residuals)
        assert torch.allclose(total, saved, rtol=1e-6, atol=1e-12), name


def test_torchs_checkpoints_keep_every_ranks_own_residuals(tmp_path):
    residuals = run_ranks(job_dcp, 2, args=(str(tmp_path),))
    assert any(not torch.equal(residuals[0][name], residuals[1][name]) for name in residuals[0])
    run_ranks(job_dcp_elsewhere, 3, args=(str(tmp_path), residuals))


def job_save(rank, spec, num_steps=4):
    model, optimizer, wire = make(spec)
    train(model, optimizer, range(num_steps))
    return wire.state_dict()


def job_load(rank, spec, states):
    model, _, wire = make(spec)
    with pytest.raises(ValueError, match=r"no 'rank1', only \['rank0'\].*saved on 3 ranks"):
        wire.load_state_dict(states[0])
    wire.load_state_dict(gradwire.merge_state_dicts(states))
    residuals = [state["memory"][f"rank{r}"]["residual:float32"] for r, state in enumerate(states)]
    residuals = [{name: tensor.double() for name, tensor in each.items()} for each in residuals]
    check_held_back(wire, residuals, "sum" if "sum" in spec else "mean")

    # And it counts for as much: without gradients of their own, steps send what was held back.
    scale = 1 if "sum" in spec else 1 / dist.get_world_size()
    held = {name: sum(each[name] for each in residuals) for name in residuals[0]}
    sent = {name: torch.zeros_like(value) for name, value in held.items()}
    for _ in range(3):
        model.zero_grad()
        (0 * model(torch.randn(5, 2, 6, 6), True)).sum().backward()
        for name, p in model.module.named_parameters():
            sent[name] += p.grad.double()
    (mine,) = wire.state_dict()["memory"].values()
    for name, value in held.items():
        left = mine["residual:float32"][name].double()
        dist.all_reduce(left)
        expected = value * (1 if "sum" in spec else 1 / len(residuals))
        assert torch.allclose(sent[name] + left * scale, expected, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("spec", ["int4", "sign:feedback=true,reduction=sum"])
def test_what_is_held_back_survives_a_change_of_the_number_of_ranks(spec):
    states = run_ranks(job_save, 3, args=(spec,))
    for world_size in (1, 2) if spec == "int4" else (4,):
        run_ranks(job_load, world_size, args=(spec, states))


def job_load_any(rank, spec, states):
    model, optimizer, wire = make(spec)
    wire.load_state_dict(gradwire.merge_state_dicts(states))
    (mine,) = wire.state_dict()["memory"].values()
    assert mine.keys() == states[0]["memory"]["rank0"].keys()
    for key, tensors in mine.items():
        if key.startswith("residual:"):
            saved = [state["memory"][f"rank{r}"][key] for r, state in enumerate(states)]
            for name, tensor in tensors.items():
                total, before = tensor.double(), torch.stack([each[name].double() for each in saved]).sum(0)
                dist.all_reduce(total)
                if "sum" not in spec:
                    total, before = total / dist.get_world_size(), before / len(states)
                rounding = 2**-8 if "bfloat16" in key else 1e-6
                assert (total - before).abs().max() <= rounding * before.abs().max(), (spec, key, name)
    train(model, optimizer, range(states[0]["step"], states[0]["step"] + 3))
    mine = flat(model)
    dist.broadcast(mine, 0)
    assert torch.equal(mine, flat(model))
    assert mine.isfinite().all()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_so_does_what_any_recipe_holds_back(seed):
    choice = random.Random(seed)
    spec = random_spec(choice, feedback=True)
    before, after = choice.sample([1, 2, 3, 4], 2)
    states = run_ranks(job_save, before, args=(spec, choice.randint(1, 6)))
    run_ranks(job_load_any, after, args=(spec, states))
