"""The plan of an outer loop, and the verdict that names one."""

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.headroom import give_verdict, predict_outer_loop, propose_outer_loop, write_records
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
    assert "4 fragments" in shown
    assert f"{two['least_period']}" in shown


def test_without_a_period_the_command_plans_the_shortest_that_the_link_allows(tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(FREE.to_json())
    options = ["--parameters", "1e6", "--compute-ms", "10", "--calibration", str(path), "--nodes", "2"]
    outer = [*options, "--recipe", "bf16", "--link", "10mbit", "--fragments", "4"]
    (found,) = json.loads(plan(*outer, "--json").stdout)
    assert (found["fragments"], found["period"]) == (4, 4 * math.ceil(found["least_period"] / 4))
    assert found["delay"] == pytest.approx(0.8 * found["period"] / 4, abs=1)
    assert found["step_ms"] == pytest.approx(10)
    wrong = plan(*options, "--recipe", "bf16", "--delay", "3")
    assert wrong.exit_code == 2
    assert "give its --period or --fragments" in " ".join(wrong.stderr.split())


@pytest.mark.parametrize("columns", ["60", "80"])
def test_headings_and_figures_are_whole_in_a_narrow_terminal(columns, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    path = tmp_path / "speeds.json"
    long = "int8:block=128,rounding=stochastic"
    path.write_text(Calibration("a machine", "2.13", {long: Costs(0, 0, 0, 0, 0)}, num_cores=2).to_json())
    outer = ["--fragments", "8", "--period", "2000", "--link", "100mbit", "--recipe", long]
    options = ["--parameters", "1e10", "--compute-ms", "400", "--calibration", str(path)]
    shown = plan(*options, *outer, "--nodes", "2,1024", "--workers", "8").stdout
    assert "…" not in shown
    assert set(shown.split()) >= {"workers", "recipe", "efficiency", "delay", "least", "period", "8192"}
    assert max(map(len, shown.splitlines()[:-1])) <= 80


def test_a_delay_fits_its_period_and_hides_a_large_fragment():
    assert predict_outer_loop(8.0, 1e6, 0.1, period=1).delay == 0  # LocalSGD takes no other
    with pytest.raises(ValueError, match="a delay of 5 steps is not less than the period of 5"):
        predict_outer_loop(8.0, 1e6, 0.1, period=5, delay=5)
    uneven = predict_outer_loop(8.0, 1e6, 0.1, fragments=4, peak=2.0)
    assert (uneven.period, uneven.delay, uneven.step_s) == (100, 40, pytest.approx(0.1))


def test_the_code_of_a_short_delay_keeps_the_steps_of_it():
    def call(delay):
        return predict_outer_loop(8.0, 2e6, 0.1, period=100, fragments=4, delay=delay).call()

    assert "DiLoCo(fragments=4, delay=5, keeps_steps=True)" in call(5)
    assert "DiLoCo(fragments=4, delay=6)" in call(6)
    assert "DiLoCo(fragments=4, delay=0)" in call(0)


def test_the_names_of_default_recipes_are_whole_at_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path, recipes = tmp_path / "speeds.json", ("fp32", "sign", "powersgd")
    free = Calibration("a machine", "2.13", dict.fromkeys(recipes, Costs(0, 0, 0, 0, 0)), num_cores=2)
    path.write_text(free.to_json())
    options = ["--parameters", "1e8", "--compute-ms", "1000", "--link", "10mbit", "--calibration", str(path)]
    chosen = [text for recipe in recipes for text in ("--recipe", recipe)]
    shown = plan(*options, *chosen, "--nodes", "2", "--fragments", "20").stdout
    assert set(shown.partition("────")[2].partition("Bytes a step")[0].split()) >= set(recipes)


def waiting(**step_ms):
    """Return a record of 4 M parameters."""
    found, sent = record(**step_ms), {"allreduce": 16_000_000, "int4": 2_000_000, "acp": 200_000}
    rows = tuple(replace(row, bytes_per_step=sent.get(row.recipe, 8_000_000)) for row in found.rows)
    return replace(found, rows=rows, num_parameters=4_000_000, gradient_bytes=16_000_000)


def test_a_verdict_names_an_outer_loop_where_even_the_best_recipe_waits_for_long():
    slow = waiting(allreduce=6000, int4=800, noop=60)
    said = give_verdict(slow)
    assert "With int4 a step still takes 13.3x as long as without communication" in said
    # 780 ms of averaging, of which a fifth is added: 17 steps, and 20 for four turns of as many.
    assert "period=20, outer=gradwire.DiLoCo(fragments=4, delay=4)), in int4" in said
    assert "sends 100.0 kB a step in the mean, and 500.0 kB at once every 5 steps" in said
    (written,) = [json.loads(write_records([slow]))["outer_loop"]]
    assert written.pop("step_ms") == pytest.approx(60, rel=0.01)
    assert written == {
        "recipe": "int4",
        "period": 20,
        "fragments": 4,
        "delay": 4,
        "bytes_per_step": 100_000,
        "bytes_per_turn": 500_000,
    }


def test_an_outer_loop_is_named_only_if_recipes_in_each_step_wait_most_of_the_time():
    assert "LocalSGD" not in give_verdict(waiting(allreduce=1000, int4=150, noop=50))
    enough = waiting(allreduce=1000, int4=150, acp=90, noop=50)
    assert "LocalSGD" not in give_verdict(enough)
    assert json.loads(write_records([enough]))["outer_loop"] is None
    # Whatever recipe, it waits for more than half of a step.
    assert "LocalSGD" in give_verdict(waiting(allreduce=1000, int4=150, acp=120, noop=50))


def test_an_outer_loop_in_int4_is_named_from_the_bytes_of_plain_ddp_if_int4_was_not_measured():
    found = propose_outer_loop(waiting(allreduce=6020, bf16=3000, noop=60))
    # An eighth of 6 s of averaging, and of the bytes.
    assert (found.period, found.turn_s) == (16, pytest.approx(6 / 8 / 4, rel=0.01))
    assert found.turn_bytes == pytest.approx(16_000_000 / 8 / 4)
