"""The cost model, its laws, and `gradwire plan`."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import gradwire
from gradwire.cli import app
from gradwire.planner import Calibration, Cluster, Costs, Wire, calibrate, predict, predict_step, wire_of
from gradwire.planner.cost import even_buckets

FREE = Costs(0.0, 0.0, 2, 0.0)
NAMES = [name for name in gradwire.RECIPES if name != "noop"]
SPEEDS = Calibration("a machine", "2.13", {name: Costs(1.0, 0.5, 2, 0.1) for name in ("allreduce", *NAMES)})


def step(num_nodes=2, rate=1e9, costs=FREE, wire=None, compute_s=0.1, **more):
    wire = wire or Wire((1_000_000,), (4_000_000,))
    return predict_step(compute_s, wire, costs, Cluster(num_nodes, bits_per_s=rate, **more)).step_s


def test_one_worker_only_computes():
    assert step(num_nodes=1) == 0.1


def test_a_bucket_that_is_ready_at_the_end_adds_the_time_of_its_bytes():
    # 4 MB at 1 Gbit/s, of which TCP gets 1448 of 1514 bytes.
    assert step(latency_s=0) == pytest.approx(0.1 + 0.032 * 1514 / 1448)
    assert step(latency_s=0, rate=None) == pytest.approx(0.1)


def test_buckets_that_are_ready_early_travel_beside_the_backward():
    split = Wire((500_000, 500_000), (2_000_000, 2_000_000))
    # The first, after two thirds of the step, is through before the second is ready.
    assert step(latency_s=0, wire=split) == pytest.approx(0.1 + 0.016 * 1514 / 1448)


def test_workers_of_a_node_share_its_link():
    alone = step(num_nodes=8, latency_s=0) - 0.1
    shared = predict_step(0.1, Wire((1_000_000,), (4_000_000,)), FREE, Cluster(4, 2, 1e9, 0.0)).step_s - 0.1
    assert shared == pytest.approx(2 * alone * 6 / 7)


def test_more_of_anything_never_makes_a_step_shorter():
    base = Costs(1.0, 0.5, 2, 0.1)
    worse = [
        Costs(2.0, 0.5, 2, 0.1),
        Costs(1.0, 5000, 2, 0.1),
        Costs(1.0, 0.5, 4, 0.1),
        Costs(1.0, 0.5, 2, 1),
    ]
    assert all(step(costs=costs) > step(costs=base) for costs in worse)
    assert step(costs=base, rate=1e8) > step(costs=base, rate=1e9) > step(costs=base, rate=1e10)
    assert step(costs=base, cores_per_worker=0.5) > step(costs=base, cores_per_worker=1)
    assert step(costs=base, latency_s=1e-2) > step(costs=base, latency_s=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_workers", [2, 8, 4096])
def test_a_plan_takes_its_bytes_from_the_recipe(name, num_workers):
    buckets = even_buckets(10_000_000, 25 * 2**18)
    expected = sum(gradwire.recipe(name).wire_bytes(n, world_size=num_workers) for n in buckets)
    found = predict(name, 10_000_000, 0.1, Cluster(num_workers, bits_per_s=1e9), SPEEDS)
    assert found.bytes_per_step == expected
    assert 0 < found.efficiency < 1
    assert sum(wire_of("allreduce", 10_000_000, num_workers).bucket_bytes) == pytest.approx(
        8e7 * (num_workers - 1) / num_workers, rel=1e-6
    )


def test_clusters_that_cannot_be_are_refused():
    for wrong in ({"num_nodes": 0}, {"num_nodes": 1, "bits_per_s": 0}, {"num_nodes": 1, "latency_s": -1}):
        with pytest.raises(ValueError, match="cluster|rate|latency"):
            Cluster(**wrong)
    with pytest.raises(ValueError, match="the calibration has no 'bf17'"):
        predict("bf17", 100, 0.1, Cluster(2), SPEEDS)


def test_the_cost_model_needs_no_torch():
    from gradwire.planner import cost

    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('cost', sys.argv[1]);"
        "module = importlib.util.module_from_spec(spec); sys.modules['cost'] = module;"
        "spec.loader.exec_module(module); assert 'torch' not in sys.modules; print(module.Cluster(2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, cost.__file__], check=True, capture_output=True, text=True
    )
    assert "Cluster(num_nodes=2" in done.stdout


def test_a_calibration_measures_every_recipe_and_comes_back_from_json():
    found = calibrate(["bf16"])
    assert list(found.costs) == ["allreduce", "bf16"]
    assert found.costs["bf16"].work_ns_per_value > 0
    assert found.costs["bf16"].rounds_per_bucket == 2
    assert Calibration.from_json(found.to_json()) == found
    for text in ("", "[]", "{}", '{"calibration_version": 9}'):
        with pytest.raises(ValueError, match="not a calibration"):
            Calibration.from_json(text)


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command_shows_what_it_predicts(tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(SPEEDS.to_json())
    options = ["--parameters", "1e6", "--compute-ms", "10", "--calibration", str(path), "--nodes", "2,4096"]
    result = plan(*options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {(row["workers"], row["recipe"]) for row in found} >= {(2, "allreduce"), (4096, "bf16")}
    shown = plan(*options, "--recipe", "bf16").stdout
    assert "1M parameters, 10 ms of compute, links of 10gbit" in shown
    assert "4096" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "1e6"], "--compute-ms must be given"),
        (["--compute-ms", "10"], "give --parameters or --model"),
        (["--compute-ms", "10", "--parameters", "0"], "must be at least 1"),
        (["--compute-ms", "10", "--parameters", "9", "--nodes", "two"], "--nodes takes numbers"),
        (["--compute-ms", "10", "--parameters", "9", "--link", "fast"], "such as 100mbit"),
        (["--recipe", "bf61"], "did you mean 'bf16'"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    result = plan(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
