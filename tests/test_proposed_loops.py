"""The outer loops that `gradwire headroom` and `gradwire plan` print are code that trains."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import gradwire
from gradwire.cli import app
from gradwire.headroom import give_verdict, read_records, write_records
from gradwire.planner import Calibration, Costs
from tests import site_runs
from tests.local_runs import assert_same_on_all_ranks, net, train
from tests.records import record

NUM_LAYERS = 3  # of `net`
RECIPES = [name for name in gradwire.RECIPES if name not in ("noop", "auto")]
SPEEDS = Calibration("a machine", "2.13", dict.fromkeys(RECIPES, Costs(0.0, 0.0, 0.0, 0.0, 0.0)), num_cores=2)


def printed_call(text):
    """Return the one call of LocalSGD in a text, as it stands there, wrapped or not."""
    (call,) = re.findall(r"gradwire\.LocalSGD\(.*?\)\)", text, re.DOTALL)
    return call


def check_training(rank, call, recipe):
    model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with eval(call, {"gradwire": gradwire, "model": model, "optimizer": optimizer}) as local:
        assert str(local.recipe).partition(":")[0] == recipe
        num_turns = 2 * local.outer.num_fragments
        ended = train(model, optimizer, local, rank, range(2 * local.period + local.outer.delay))
        assert len(ended) >= num_turns
        assert local.num_averages >= num_turns
        assert local.stats().bytes_sent > 0
        local.average()
        assert_same_on_all_ranks(model)
        assert all(p.isfinite().all() for p in model.parameters())


def waiting_record(num_layers, **step_ms):
    found = record(**step_ms)
    sent = {"allreduce": 16_000_000, "int4": 2_000_000}
    rows = tuple(replace(row, bytes_per_step=sent.get(row.recipe)) for row in found.rows)
    return replace(found, rows=rows, num_layers=num_layers)


@pytest.mark.parametrize("num_layers", [1, 2, NUM_LAYERS])
def test_the_loop_that_a_verdict_names_trains(num_layers, two_ranks):
    found = waiting_record(num_layers, allreduce=3000, int4=400, noop=60)
    call = printed_call(give_verdict(found))
    assert f"DiLoCo(fragments={num_layers}, " in call
    two_ranks.run(check_training, call, "int4")


def check_sharded_training(rank, call):
    model, _ = site_runs.sharded(native=True, grid=(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with eval(call, {"gradwire": gradwire, "model": model, "optimizer": optimizer}) as local:
        site_runs.train(model, optimizer, local, rank, range(2 * local.period + local.outer.delay))
        assert local.num_averages >= 2 * local.outer.num_fragments
        local.average()
        site_runs.assert_sites_same(model)


def test_the_loop_that_a_verdict_names_trains_a_model_sharded_over_two_dimensions(two_ranks):
    found = waiting_record(NUM_LAYERS, allreduce=3000, int4=400, noop=60)
    call = printed_call(give_verdict(replace(found, sharding="hsdp")))
    two_ranks.run(check_sharded_training, call)


def test_a_verdict_names_four_fragments_unless_the_model_has_fewer_layers():
    for num_layers, fragments in ((3, 3), (4, 4), (60, 4), (None, 4)):
        found = waiting_record(num_layers, allreduce=3000, int4=400, noop=60)
        assert f"DiLoCo(fragments={fragments}, " in give_verdict(found)
        assert read_records(write_records([found])) == [found]
    old = json.loads(write_records([found]))
    del old["num_layers"]
    assert read_records(json.dumps(old)) == [found]


def plan(path, *arguments):
    path.write_text(SPEEDS.to_json())
    options = ["--parameters", "1e6", "--compute-ms", "10", "--nodes", "2", "--calibration", str(path)]
    return CliRunner().invoke(app, ["plan", *options, *arguments])


@pytest.mark.parametrize(
    "options",
    [
        ("--fragments", "3", "--link", "100mbit"),
        ("--fragments", "1", "--link", "1gbit"),
        ("--period", "1", "--link", "10gbit"),
        ("--period", "7", "--fragments", "2", "--link", "10mbit"),
        ("--period", "6", "--fragments", "3", "--delay", "5"),
    ],
    ids=" ".join,
)
def test_the_loop_that_a_plan_prints_trains(options, two_ranks, tmp_path):
    found = plan(tmp_path / "speeds.json", *options, "--recipe", "bf16")
    assert found.exit_code == 0, found.stderr
    two_ranks.run(check_training, printed_call(found.stdout), "bf16")


def test_a_plan_has_a_loop_that_trains_for_each_recipe(two_ranks, tmp_path):
    options = [word for name in RECIPES for word in ("--recipe", name)]
    found = plan(tmp_path / "speeds.json", "--period", "4", "--fragments", "2", "--json", *options)
    rows = json.loads(found.stdout)
    assert [row["recipe"] for row in rows] == RECIPES
    for row in rows:
        two_ranks.run(check_training, row["call"], row["recipe"])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("topk:momentum=0.9", "give the momentum to outer="),
        ("bf16:reduction=sum", "needs a recipe that averages"),
        ("noop", "an outer loop needs a recipe that averages"),
    ],
)
def test_a_plan_refuses_a_recipe_that_local_sgd_refuses(recipe, message, tmp_path):
    path = tmp_path / "speeds.json"
    given = Calibration("a machine", "2.13", {recipe: Costs(0.0, 0.0, 0.0, 0.0, 0.0)}, num_cores=2)
    path.write_text(given.to_json())
    options = ["--parameters", "1e6", "--compute-ms", "10", "--calibration", str(path), "--recipe", recipe]
    refused = CliRunner().invoke(app, ["plan", *options, "--fragments", "2"])
    assert refused.exit_code == 2
    assert message in " ".join(refused.stderr.split())
