"""The plan of an outer loop, and the verdict that names one."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.headroom import give_verdict
from gradwire.planner import Calibration, Cluster, Costs, predict_outer
from tests.records import record

FREE = Calibration("a machine", "2.13", {"bf16": Costs(0.0, 0.0, 0.0, 0.0, 0.0)}, num_cores=2)
MATRICES = [(1000, 500)] * 8  # 4 M values, 8 MB in bf16


def outer_loop(**options):
    cluster = Cluster(num_nodes=2, bits_per_s=8e6, latency_s=0.0)  # a megabyte a second
    options = {"compute_s": 0.1, "period": 100, **options}
    return predict_outer("bf16", MATRICES, cluster=cluster, calibration=FREE, **options)


def test_an_outer_loop_sends_its_bytes_once_a_period_and_a_fragment_of_them_at_a_time():
    whole, parts = outer_loop(), outer_loop(fragments=4)
    assert whole.bytes_per_step == parts.bytes_per_step == 80_000
    assert (whole.turn_bytes, parts.turn_bytes) == (8_000_000, 2_000_000)
    # 8 s of sending, and TCP's headers.
    assert whole.turn_s == pytest.approx(8 * 1514 / 1448)
    assert whole.least_period == parts.least_period == math.ceil(8 * 1514 / 1448 / 0.1 / 0.8)


def test_a_delay_hides_an_averaging_if_it_is_long_enough():
    assert outer_loop(delay=0).step_s == pytest.approx(0.1 + 0.08 * 1514 / 1448)
    assert outer_loop(fragments=4, delay=10).step_s == pytest.approx(0.1 + (2 * 1514 / 1448 - 1) / 25)
    found = outer_loop(fragments=4)
    assert (found.delay, found.step_s, found.efficiency) == (21, 0.1, 1.0)
    # Turns of 12.5 steps are too short for averagings of 21.
    busy = outer_loop(fragments=4, period=50)
    assert (busy.delay, busy.least_period) == (12, 105)
    assert busy.step_s > 0.1
    with pytest.raises(ValueError, match="a period of 3 steps is too short for 4 fragments"):
        outer_loop(fragments=4, period=3)


def test_the_peak_of_a_model_is_that_of_its_largest_fragment():
    module = torch.nn.Sequential(torch.nn.Linear(9, 9, bias=False), torch.nn.Linear(9, 1, bias=False))
    cluster = Cluster(num_nodes=2)
    found = predict_outer("bf16", module, 0.1, cluster, FREE, period=10, fragments=2)
    assert found.peak == pytest.approx(2 * 81 / 90)
    with pytest.raises(ValueError, match="2 layers .* too few for 3 fragments"):
        predict_outer("bf16", module, 0.1, cluster, FREE, period=10, fragments=3)


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command_plans_an_outer_loop(tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(FREE.to_json())
    options = ["--parameters", "1e6", "--compute-ms", "10", "--calibration", str(path), "--nodes", "2,8"]
    outer = [*options, "--recipe", "bf16", "--period", "50", "--fragments", "4", "--link", "10mbit"]
    (two, eight) = json.loads(plan(*outer, "--json").stdout)
    assert (two["workers"], eight["workers"]) == (2, 8)
    assert two["bytes_per_turn"] == pytest.approx(50 / 4 * two["bytes_per_step"], rel=0.01)
    shown = " ".join(plan(*outer).stdout.split())
    assert "averaged every 50 steps" in shown
    assert f"{two['least_period']}" in shown


def test_a_verdict_names_an_outer_loop_where_even_the_best_recipe_waits_for_long():
    said = give_verdict(record(allreduce=1000, bf16=500, noop=50))
    assert "Even so, a step takes 10.0x as long as without communication" in said
    assert "averaging parameters every 90 steps instead, with gradwire.LocalSGD" in said
    assert "LocalSGD" not in give_verdict(record(allreduce=1000, bf16=150, noop=50))
