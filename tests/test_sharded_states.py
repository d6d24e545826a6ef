"""States of sharded models: resumed bit for bit, and cut anew for other numbers of replicas and shards."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.averaging import checkpoint
from tests.sharded_runs import (
    attached,
    batch,
    full_gradients,
    loss_of,
    make,
    require_near,
    same_bits,
    shard,
    train,
    world,
)


def held_back(wire):
    """Return what all ranks together hold back of each whole parameter, in units of the mean."""
    fields = checkpoint.check_fields(wire.state_dict(gather=True))
    shapes, grid = {name: p.shape for name, p in make().named_parameters()}, fields.grid
    found = {}
    for number in range(grid.num_replicas):
        parts = [fields.memory[rank]["residual:float32"] for rank in grid.replica(number)]
        for name in parts[0]:
            whole = torch.cat([part[name] for part in parts])[: shapes[name][0]]
            assert whole.shape == shapes[name]
            found[name] = found.get(name, 0) + whole / grid.num_replicas
    return found


def load_through_checkpoint(wire, path):
    saved = {"wire": wire.checkpoint_template(dcp.FileSystemReader(path).read_metadata())}
    dcp.load(saved, checkpoint_id=path)
    wire.load_state_dict(saved["wire"])
    return saved["wire"]


def check_resume(rank, path):
    """A run that was stopped and loaded from a checkpoint has the bits of one that was not."""
    model, wire = attached("powersgd:rank=2", False)
    train(model, range(3), rank)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    dcp.save({"wire": wire.state_dict()}, checkpoint_id=path)
    want = train(model, range(3, 6), rank)
    wire.detach()
    model, wire = attached("powersgd:rank=2", True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.to_local().copy_(weights[name].to_local())
    assert len(load_through_checkpoint(wire, path)["memory"]) == 1  # each rank reads its own
    assert same_bits(train(model, range(3, 6), rank), want)
    wire.detach()


def test_a_resumed_run_has_the_same_bits(four_ranks, tmp_path):
    four_ranks.run(check_resume, str(tmp_path / "checkpoint"))


def check_other_grids(rank, path, spec, grids):
    """All ranks together hold back as much as before, on every grid of replicas and shards."""
    model, wire = attached(spec, False)
    train(model, range(2), rank)
    before = held_back(wire)
    assert all(left.abs().max() > 0 for left in before.values())
    dcp.save({"wire": wire.state_dict()}, checkpoint_id=path)
    whole = DistributedDataParallel(make())
    other = gradwire.attach(whole, spec)
    with pytest.raises(ValueError, match="states of all of them are needed"):
        other.load_state_dict(wire.state_dict())
    load_through_checkpoint(other, path)  # a model that is not sharded
    assert same_bits(held_back(other), before)
    other.detach()
    wire.detach()
    for grid in grids:
        model, wire = attached(spec, True, grid=grid)
        load_through_checkpoint(wire, path)
        after = held_back(wire)
        assert after.keys() == before.keys()
        assert all(torch.allclose(after[name], left) for name, left in before.items()), grid
        train(model, range(2), rank)
        wire.detach()


@pytest.mark.parametrize(
    ("spec", "grids"),
    [
        ("int4", [(1, 4)]),
        pytest.param("int4", [(4, 1), (2, 2)], marks=pytest.mark.full),
        pytest.param("sign", [(1, 4), (4, 1)], marks=pytest.mark.full),
    ],
)
def test_a_state_is_cut_anew_for_other_shards_and_replicas(spec, grids, four_ranks, tmp_path):
    four_ranks.run(check_other_grids, str(tmp_path / "checkpoint"), spec, grids)


def check_factors(rank):
    """Factors of other shards start anew; what was held back stays."""
    model, wire = attached("powersgd:rank=2", False)
    train(model, range(2), rank)
    before, merged = held_back(wire), wire.state_dict(gather=True)
    wire.detach()
    model, wire = attached("powersgd:rank=2", True, grid=(4, 1))
    wire.load_state_dict(merged)
    (states,) = wire.state_dict()["memory"].values()
    assert set(states) == {"residual:float32"}
    after = held_back(wire)
    assert all(torch.allclose(after[name], left) for name, left in before.items())
    train(model, range(2), rank)
    wire.detach()


@pytest.mark.full
def test_factors_of_other_shards_start_anew(four_ranks):
    four_ranks.run(check_factors)


def check_scatter(rank, divides_afterwards):
    """A reduce-scatter keeps no residuals, and adds those of a state to its first gradients."""
    model, wire = attached("int4", False)
    train(model, range(2), rank)
    before, merged = held_back(wire), wire.state_dict(gather=True)
    wire.detach()
    model = shard(make())
    if divides_afterwards:
        for unit in (*model.blocks, model):
            unit.set_gradient_divide_factor(3.0)
            unit.set_force_sum_reduction_for_comms(True)
    for spec in ("fp32", "route(ndim<2=bf16; *=fp32)"):
        with gradwire.attach(model, spec) as wire:
            gradients = []
            for step in range(3):
                if step == 1:
                    wire.load_state_dict(merged)
                model.zero_grad()
                loss_of(model, batch(rank, 0)).backward()
                gradients.append(full_gradients(model))
            found = {name: gradients[1][name] - plain for name, plain in gradients[0].items()}
            for name, left in before.items():
                assert (found[name] - left).abs().max() <= 0.01 * left.abs().max() + 1e-6, name
            require_near(gradients[2], gradients[0], 1e-6)
            assert not any(wire.state_dict()["memory"].values())


@pytest.mark.parametrize("divides_afterwards", [False, True])
def test_a_reduce_scatter_sends_what_replicas_have_held_back(divides_afterwards, four_ranks):
    four_ranks.run(check_scatter, divides_afterwards)


def check_damage(rank):
    model, wire = attached("int4", False)
    train(model, range(1), rank)
    merged = wire.state_dict(gather=True)
    names = list(merged["memory"])
    assert names == ["replica0-shard0of2", "replica1-shard0of2", "replica0-shard1of2", "replica1-shard1of2"]
    for name in (
        "replica0-shard2of2",
        "replica2-shard0of2",
        "replica0-shard0of3",
        "rank0",
        "replica0-shard0of1",
    ):
        damaged = {**merged["memory"], name: merged["memory"][names[0]]}
        with pytest.raises(ValueError, match="has the memory of"):
            wire.load_state_dict({**merged, "memory": damaged})
    whole = {f"rank{number}": each for number, each in enumerate(merged["memory"].values())}
    with pytest.raises(ValueError, match="with shape"):
        wire.load_state_dict({**merged, "memory": whole})
    with pytest.raises(ValueError, match="with its model"), gradwire.Averager("int4") as averager:
        averager.load_state_dict(merged)
    wire.detach()
    dist.barrier()
    assert world() == 4


def test_a_state_that_names_other_ranks_is_refused(four_ranks):
    four_ranks.run(check_damage)
