"""Plans of sharded models: the bytes of wires, the laws of the cost model, and `gradwire plan --sharding`."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gradwire
from gradwire.cli import app
from gradwire.headroom import Sharding
from gradwire.planner import (
    BucketTraffic,
    Calibration,
    Cluster,
    Costs,
    ShardedPlan,
    predict_sharded,
    sharded_traffic,
    typical_shapes,
)
from gradwire.planner.sharded_cost import ShardedCosts, ShardedTraffic, UnitTraffic, predict_sharded_step
from gradwire.sharded import shard_blocks
from tests.sharded_runs import attached, batch, loss_of, make

SOME = Costs(1.0, 0.5, 0.2, 0.05, 0.1)
NAMES = ("fp32", "bf16", "int8", "int4", "sign", "powersgd")
SPEEDS = Calibration("a machine", "2.13", dict.fromkeys(("allreduce", *NAMES), SOME), num_cores=2)
SHAPES = typical_shapes(10_000_000)


def planned(kind, num_shards, spec, weights, model=None):
    cluster = Cluster(2, 1) if kind == "fsdp" else Cluster(2, 2)
    plan = ShardedPlan(Sharding(kind, num_shards), weights)
    units = sharded_traffic(spec, model or make(), cluster, plan).units
    gathers = sum(unit.num_gathers * unit.gather.worker_bytes for unit in units)
    return sum(unit.average.worker_bytes for unit in units if unit.average is not None), gathers


def check_fsdp(rank, specs):
    for spec in specs:
        for weights in (None, "int8"):
            model = shard_blocks(make(), None)
            with gradwire.attach(model, spec, weights=weights) as wire:
                loss_of(model, batch(rank, 0)).backward()
                averages, gathers = planned("fsdp", 2, spec, weights)
                sent = max(wire.plan().bytes_sent, wire.stats().bytes_sent - 24 * 3)
                assert averages == pytest.approx(sent, rel=0.01), spec
                assert gathers == pytest.approx(wire.plan().bytes_gathered, rel=0.01)


def test_a_plan_has_the_bytes_of_a_wire_of_the_sharded_model(two_ranks):
    two_ranks.run(check_fsdp, ["sign"])


def nested():
    """Return a model with blocks inside blocks, and a frozen one."""
    inner = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    model = nn.Sequential(nn.Linear(128, 128), nn.Sequential(inner, nn.LayerNorm(128)), nn.Linear(128, 16))
    model[0].requires_grad_(False)
    return model


def check_nested(rank):
    model = shard_blocks(nested(), None)
    with gradwire.attach(model, "int8") as wire:
        model(torch.randn(4, 128)).square().mean().backward()
        averages, gathers = planned("fsdp", 2, "int8", None, nested())
        assert averages == pytest.approx(wire.plan().bytes_sent, rel=0.01)
        assert gathers == pytest.approx(wire.plan().bytes_gathered, rel=0.01)


def test_blocks_inside_blocks_and_frozen_ones_are_gathered(two_ranks):
    two_ranks.run(check_nested)


def check_hsdp(rank, specs):
    for spec in specs:
        model, wire = attached(spec, True)
        loss_of(model, batch(rank, 0)).backward()  # from here on the root is not freed after the forward pass
        averages, gathers = planned("hsdp", 2, spec, None)
        assert averages == pytest.approx(wire.plan().bytes_sent, rel=0.01), spec
        assert gathers == pytest.approx(wire.plan().bytes_gathered, rel=0.01)
        wire.detach()


def test_a_plan_has_the_bytes_of_a_wire_between_replicas(four_ranks):
    four_ranks.run(check_hsdp, ["powersgd:rank=2"])


def step(kind="fsdp", recipe="int8", cluster=None, compute_s=0.1, **more):
    cluster = cluster or Cluster(4, 2, 1e9)
    shards = cluster.num_workers if kind == "fsdp" else cluster.workers_per_node
    plan = ShardedPlan(Sharding(kind, shards), **more)
    return predict_sharded(recipe, SHAPES, compute_s, cluster, SPEEDS, plan)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_less_of_anything_never_makes_a_step_longer(kind):
    base = step(kind)
    assert base.step_s > 0.1
    assert step(kind, recipe="int4").step_s <= base.step_s < step(kind, recipe="allreduce").step_s
    assert step(kind, weights="int8").step_s < base.step_s
    assert step(kind, reshards=False).step_s < base.step_s
    assert step(kind, cluster=Cluster(4, 2, 1e10)).step_s < base.step_s
    assert step(kind, compute_s=0.05).step_s < base.step_s


def test_gathers_stay_within_nodes_that_hold_a_replica():
    assert step("hsdp").gathered_bytes == 0
    whole, once = step("fsdp"), step("fsdp", reshards=False)
    assert whole.gathered_bytes == pytest.approx(2 * 4 * 10e6 * 7 / 8, rel=0.01)
    assert once.gathered_bytes == whole.gathered_bytes / 2
    # torch's ring has seven of eight shards on each link, gradwire sends each of a node's to three others.
    few = step("fsdp", weights="int8").gathered_bytes
    assert few == pytest.approx(whole.gathered_bytes / 4 * 6 / 7, rel=0.03)
    # If a replica has two nodes, a node's two shards go to both ranks of the other node.
    wide = predict_sharded(
        "int8", SHAPES, 0.1, Cluster(4, 2), SPEEDS, ShardedPlan(Sharding("hsdp", 4), "fp32")
    )
    assert wide.gathered_bytes == pytest.approx(2 * 4 * 10e6, rel=0.01)
    # A node of two workers sends two shards' averages: together, those of the whole model between replicas.
    assert step("hsdp", "fp32").bytes_per_step == pytest.approx(2 * 4 * 10e6 * 3 / 4, rel=0.01)


def test_replicas_that_share_a_node_send_no_more_than_one():
    nodes = Cluster(2, 4, 1e9)
    spread = predict_sharded("int8", SHAPES, 0.1, nodes, SPEEDS, ShardedPlan(Sharding("hsdp", 4)))
    shared = predict_sharded("int8", SHAPES, 0.1, nodes, SPEEDS, ShardedPlan(Sharding("hsdp", 2)))
    assert shared.bytes_per_step == pytest.approx(spread.bytes_per_step, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "recipe", "expected_s"),
    # The first average is under way from 4 s to 9 s.
    [
        ("fsdp", "allreduce", 15.5),  # the second block is computed after it
        ("fsdp", "int8", 12.5),  # the second and the third beside it
        ("hsdp", "int8", 10.5),  # all are
    ],
)
def test_blocks_are_computed_beside_as_many_averages_as_a_wire_lets_travel(kind, recipe, expected_s):
    plan = ShardedPlan(Sharding(kind, 4 if kind == "fsdp" else 2))
    num_left = sharded_traffic(recipe, SHAPES, Cluster(2, 2), plan).num_left
    units = [
        UnitTraffic(
            BucketTraffic(num_values, 0, 0, 0, 0, 0), 1, BucketTraffic(0, 0, average_s * 1e6, 1, 1, 0)
        )
        for num_values, average_s in ((3, 0.5), (1, 0.5), (1, 0.5), (1, 5))
    ]
    no_cost = Costs(0, 0, 0, 0, 0)
    predicted = predict_sharded_step(
        9.0,
        ShardedTraffic(tuple(units), num_left=num_left),
        ShardedCosts(no_cost, no_cost, no_cost),
        Cluster(2, bits_per_s=8e6 * 1514 / 1448),
    )
    assert predicted.step_s == pytest.approx(expected_s)


def test_one_worker_only_computes():
    assert step("fsdp", cluster=Cluster(1)).step_s == pytest.approx(0.1)
    alone = step("hsdp", cluster=Cluster(1, 2))
    assert alone.bytes_per_step == 0
    assert alone.step_s > 0.1  # it gathers within the node


def run(*arguments):
    return CliRunner().invoke(app, ["plan", "--parameters", "1e6", "--compute-ms", "10", *arguments])


def test_the_command_plans_sharded_models(tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(SPEEDS.to_json())
    base = ["--calibration", str(path), "--nodes", "2,16", "--workers", "4", "--recipe", "int8"]
    result = run(*base, "--sharding", "fsdp", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(row["workers"], row["recipe"]) for row in found] == [
        (8, "allreduce"),
        (8, "int8"),
        (64, "allreduce"),
        (64, "int8"),
    ]
    assert all(0 < row["gathered_bytes"] < row["bytes_per_step"] for row in found)
    shown = run(*base, "--sharding", "hsdp", "--weights", "bf16").stdout
    assert "hsdp" in shown
    assert "gathers" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sharding", "zero"], "must be fsdp or hsdp, not 'zero'"),
        (["--shards", "2"], "go with --sharding"),
        (["--sharding", "fsdp", "--period", "5"], "leave out --sharding"),
        (["--sharding", "fsdp", "--recipe", "powersgd"], "whole matrices"),
        (["--sharding", "hsdp", "--shards", "3", "--workers", "2", "--recipe", "int8"], "3 shards"),
        (["--sharding", "fsdp", "--weights", "sign"], "cannot encode parameters"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message, tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(SPEEDS.to_json())
    result = run("--calibration", str(path), *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
