"""The cost model, its laws, and `gradwire plan`."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import gradwire
from gradwire.cli import app, calibrations
from gradwire.cli.plan_options import PlanOptions
from gradwire.lanes import lane as execution
from gradwire.planner import (
    BucketTraffic,
    Calibration,
    Cluster,
    Costs,
    StepTraffic,
    calibrate,
    cost,
    predict,
    predict_step,
    step_traffic,
    typical_shapes,
    validate,
)
from gradwire.recipes import placed
from gradwire.testing import run_ranks

FREE = Costs(0.0, 0.0, 0.0, 0.0, 0.0)
SOME = Costs(1.0, 0.5, 0.2, 0.05, 0.1)
NAMES = [name for name in gradwire.RECIPES if name not in ("noop", "auto")]
SPEEDS = Calibration("a machine", "2.13", dict.fromkeys(("allreduce", *NAMES), SOME), num_cores=2)
SHAPES = typical_shapes(10_000_000)


def bucket(num_values=1_000_000, num_bytes=4_000_000):
    return BucketTraffic(num_values, num_bytes, num_bytes, 2, 2, 3)


def step(num_nodes=2, rate=1e9, costs=FREE, traffic=None, compute_s=0.1, **more):
    return predict_step(
        compute_s, traffic or StepTraffic((bucket(),)), costs, Cluster(num_nodes, bits_per_s=rate, **more)
    ).step_s


def test_one_worker_only_computes():
    assert step(num_nodes=1) == 0.1


def test_a_bucket_that_is_ready_at_the_end_adds_the_time_of_its_bytes():
    # 4 MB at 1 Gbit/s, of which TCP gets 1448 of 1514 bytes.
    assert step(latency_s=0) == pytest.approx(0.1 + 0.032 * 1514 / 1448)
    assert step(latency_s=0, rate=None) == pytest.approx(0.1)


def test_buckets_that_are_ready_early_travel_beside_the_backward():
    split = StepTraffic((bucket(500_000, 2_000_000), bucket(500_000, 2_000_000)))
    # The first is ready after two thirds of the step, and averaged before the second is ready.
    assert step(latency_s=0, traffic=split) == pytest.approx(0.1 + 0.016 * 1514 / 1448)


def test_two_buckets_are_under_way_at_once():
    # Both are ready at once, as there is no compute. While the first is on the link, the second is encoded.
    both = StepTraffic((bucket(), bucket()))
    moving = 0.032 * 1514 / 1448
    busy = replace(FREE, work_ns_per_value=10)  # 10 ms of each bucket
    assert step(latency_s=0, costs=busy, traffic=both, compute_s=0) == pytest.approx(
        0.01 + 2 * moving, rel=0.2
    )
    # Of three buckets that only wait, the second waits at the same time as the first.
    slow, three = replace(FREE, round_ms=500), StepTraffic((bucket(1, 0),) * 3)
    assert step(latency_s=0, costs=slow, traffic=three, compute_s=0) == pytest.approx(2 * 2 * 0.5)
    assert cost.NUM_IN_FLIGHT == execution.NUM_IN_FLIGHT


def test_messages_of_a_round_cost_cpu_each_and_wait_together():
    def messages(number):
        return StepTraffic((BucketTraffic(1_000_000, 0, 0, 2, number, 3),))

    waiting, posting = replace(FREE, round_ms=3), replace(FREE, message_ms=3)
    assert step(costs=waiting, traffic=messages(2)) == step(costs=waiting, traffic=messages(2000))
    more = step(costs=posting, traffic=messages(2000)) - step(costs=posting, traffic=messages(1000))
    assert more == pytest.approx(3.0)


@pytest.mark.parametrize(
    "ten_ms", [{"work_ns_per_value": 20}, {"copy_ns_per_byte": 5}, {"bucket_ms": 10}, {"message_ms": 5}]
)
def test_whatever_takes_cpu_delays_a_backward_that_has_no_core_to_itself(ten_ms):
    traffic, costs = StepTraffic((bucket(500_000, 2_000_000),) * 2), replace(FREE, **ten_ms)
    found = [
        step(costs=costs, traffic=traffic, rate=None, latency_s=0, cores_per_worker=cores)
        for cores in (2, 1.5, 1)
    ]
    # The last bucket's ten ms follow the backward, which loses none, a third or all of the first one's.
    assert found == pytest.approx([0.11, 0.11 + 0.01 / 3, 0.12])
    waiting = replace(FREE, round_ms=5)
    assert step(costs=waiting, cores_per_worker=1) == step(costs=waiting, cores_per_worker=2)


def test_more_of_anything_never_makes_a_step_shorter():
    base = SOME
    worse = {"work_ns_per_value": 2, "copy_ns_per_byte": 5e3, "bucket_ms": 1, "message_ms": 1, "round_ms": 1}
    assert all(step(costs=replace(base, **{name: more})) > step(costs=base) for name, more in worse.items())
    assert step(costs=base, rate=1e8) > step(costs=base, rate=1e9) > step(costs=base, rate=1e10)
    assert step(costs=base, cores_per_worker=0.5) > step(costs=base, cores_per_worker=1)
    assert step(costs=base, latency_s=1e-2) > step(costs=base, latency_s=1e-5)
    meeting = [step(traffic=StepTraffic((bucket(),), num_meeting=number)) for number in (1, 2, 3, 8, 64)]
    assert meeting[0] == meeting[1] == step(), "two send each other one message at a time"
    assert meeting[1:] == sorted(set(meeting))


@pytest.mark.parametrize(
    ("name", "num_workers", "of_near_ranks", "of_far_ranks"),
    [
        ("int8", 2, 2, 1),
        ("int8", 3, 3, 2),
        ("fp32", 2, 3, 2),
        ("acp", 2, 2, 1),
        ("powersgd", 2, 4, 2),
        ("powersgd", 8, 6, 4),
        ("noop", 2, 0, 0),
        ("allreduce", 2, 4, 4),
        ("allreduce", 3, 8, 8),
    ],
)
def test_an_average_takes_the_time_of_its_messages(name, num_workers, of_near_ranks, of_far_ranks):
    for num_trips, latency_s in ((of_near_ranks, 0.0005), (of_far_ranks, 0.1)):
        traffic = step_traffic(name, [(1000, 1000)], Cluster(num_workers, latency_s=latency_s))
        late, at_once = (step(traffic=traffic, rate=None, latency_s=each) for each in (latency_s, 0.0))
        assert late - at_once == pytest.approx(num_trips * latency_s)


def test_large_messages_wait_until_they_are_awaited_on_far_links_too():
    traffic = step_traffic("fp32", [(4000, 1000)], Cluster(2, latency_s=0.1))
    assert traffic.buckets[0].num_trips == 3


@pytest.mark.parametrize(
    ("name", "shape", "like"),
    [
        ("powersgd", (1_000_000,), "fp32"),  # a vector, which has no factors
        ("int8:local_size=2,within=same", (1000, 1000), "int8"),  # a grid of one row
        ("fp32:local_size=2", (1000, 1000), "fp32"),  # a single node
    ],
)
def test_an_average_that_is_a_single_sum_is_planned_as_one(name, shape, like):
    found, expected = (step_traffic(each, [shape], Cluster(2)) for each in (name, like))
    assert found.buckets[0].num_trips == expected.buckets[0].num_trips
    if "within" in name:
        assert found.work == expected.work


def sent(recipe, shapes, cluster, **more):
    return sum(b.worker_bytes for b in step_traffic(recipe, shapes, cluster, **more).buckets)


@pytest.mark.parametrize("num_workers", [2, 8, 4096])
def test_a_plan_takes_its_bytes_from_the_recipe(num_workers):
    cluster = Cluster(num_workers, bits_per_s=1e9)
    matrix = [(1000, 1000)]
    for name in NAMES:
        whole = sent(name, matrix, cluster)
        if name not in ("powersgd", "acp"):
            recipe = placed(gradwire.recipe(name), 1, num_workers)
            of_a_rank = recipe.wire_bytes(1_000_000, rank=0, world_size=num_workers)
            assert whole == pytest.approx(of_a_rank, rel=64 * num_workers / 1_000_000)
            assert whole >= of_a_rank
        found = predict(name, SHAPES, 0.1, cluster, SPEEDS)
        assert found.bytes_per_step == pytest.approx(sent(name, SHAPES, cluster), abs=1)
        assert 0 < found.efficiency < 1
    assert sent("allreduce", matrix, cluster) == pytest.approx(8e6 * (num_workers - 1) / num_workers)


def test_a_plan_is_of_the_busiest_worker():
    # There are fewer values than chunks. The first workers own none, and send all of theirs to the others.
    for name, shapes in (("int8", [(100,)]), ("fp32", [(65,)]), ("int4", [(1000, 10)])):
        recipe, numel = gradwire.recipe(name), sum(map(math.prod, shapes))
        of_ranks = [recipe.wire_bytes(numel, rank=rank, world_size=8) for rank in range(8)]
        assert sent(name, shapes, Cluster(8)) == max(of_ranks) > min(of_ranks)


def test_low_rank_is_priced_by_the_shapes_it_is_given():
    two = Cluster(2)
    # The two factors of rank 4, and a vote.
    assert sent("powersgd:rank=4", [(1000, 1000)], two) == 4 * (4 * 1000 + 1 + 4 * 1000)
    # The default has eight times the rank in an eighth of the bits, and a scale for each 128 values.
    usual = sent("powersgd:rank=4", [(1000, 1000)], two)
    assert sent("powersgd", [(1000, 1000)], two) == pytest.approx((1 + 4 / 128) * usual, rel=0.01)
    # An eighth of the vectors have twice the bits.
    mixed = sent("powersgd:factors=int8+int4", [(1000, 1000)], two)
    assert mixed == pytest.approx((9 / 8 + 4 / 128) * usual, rel=0.01)
    assert sent("powersgd:rank=1", [(1000, 1000), (50,)], two) == 4 * (1000 + 51 + 1000)
    # The factors take turns: one in even steps, the other in odd ones.
    assert sent("acp:rank=4", [(1000, 3000)], two) == 4 * (4 * (1000 + 3000) / 2 + 1)
    assert sent("powersgd", [(1_000_000,)], two) == sent("fp32", [(1_000_000,)], two)
    rounds = {
        (spec, n): step_traffic(spec, [(1000, 1000)], Cluster(n)).buckets[0].num_rounds
        for spec in ("powersgd:rank=4", "powersgd")
        for n in (2, 64)
    }
    # Two ranks send each other their factors in one round, many in two. The vote travels with the first.
    assert list(rounds.values()) == [2, 4, 2, 4]


def test_workers_of_a_node_average_within_it_first():
    nodes = Cluster(num_nodes=4, workers_per_node=8, bits_per_s=1e9)
    ring, flat, levels = (
        step_traffic(name, [(1000, 1000)], nodes).buckets[0] for name in ("allreduce", "powersgd", "bf16")
    )
    assert ring.node_bytes == ring.worker_bytes  # one worker of the node sends to the next
    assert flat.node_bytes == pytest.approx(8 * flat.worker_bytes * 24 / 31)
    bf16 = gradwire.recipe("bf16:local_size=8")
    leaving = max(bf16.link_bytes(1_000_000, rank=rank, world_size=32).across for rank in range(32))
    assert levels.node_bytes == 8 * leaving < ring.node_bytes
    assert (levels.num_rounds, levels.num_messages) == (4, 2 * 7 + 2 * 3)
    assert step_traffic("bf16", [(1000, 1000)], Cluster(1, 8)).buckets[0].num_rounds == 2


@pytest.mark.parametrize("bucket_mb", [None, 1, 4])
def test_shapes_are_cut_into_the_buckets_that_ddp_makes_of_a_model_of_these_shapes(bucket_mb):
    model = torch.nn.ParameterList(torch.empty(shape, device="meta") for shape in SHAPES)
    cut, made = (step_traffic("int8", each, Cluster(2), bucket_mb).buckets for each in (SHAPES, model))
    assert len(cut) > 1
    assert cut == made


def test_a_model_of_a_size_has_as_many_parameters():
    for number in (1, 999, 19_000_000, 7_000_000_000):
        assert sum(map(math.prod, typical_shapes(number))) == number


def test_clusters_that_cannot_be_are_refused():
    for wrong in (
        {"num_nodes": 0},
        {"num_nodes": 1, "bits_per_s": 0},
        {"num_nodes": 1, "latency_s": -1},
        {"num_nodes": 1, "latency_s": math.inf},
        {"num_nodes": 10**12},
    ):
        with pytest.raises(ValueError, match="cluster|rate|latency"):
            Cluster(**wrong)
    with pytest.raises(ValueError, match="2 ranks cannot be nodes of 8"):
        step_traffic("int8:local_size=8", SHAPES, Cluster(2))
    with pytest.raises(ValueError, match="the calibration has no 'bf17'"):
        predict("bf17", SHAPES, 0.1, Cluster(2), SPEEDS)


def test_the_cost_model_needs_no_torch():
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('cost', sys.argv[1]);"
        "module = importlib.util.module_from_spec(spec); sys.modules['cost'] = module;"
        "spec.loader.exec_module(module); assert 'torch' not in sys.modules; print(module.Cluster(2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, cost.__file__], check=True, capture_output=True, text=True
    )
    assert "Cluster(num_nodes=2" in done.stdout


@pytest.mark.full
def test_a_calibration_measures_every_recipe_and_comes_back_from_json(monkeypatch):
    monkeypatch.setattr("gradwire.planner.calibration._NUM_STEPS", {(25, 512): 4, (1, 32): 4})
    seen = []
    found = calibrate(["bf16", "acp", "noop"], lambda *done: seen.append(done))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert list(found.costs) == ["allreduce", "bf16", "acp"]
    assert all(costs.copy_ns_per_byte >= 0 < costs.message_ms for costs in found.costs.values())
    assert all(found.costs[name].work_ns_per_value > 0 for name in ("bf16", "acp"))
    assert Calibration.from_json(found.to_json()) == found


WRITTEN = json.loads(SPEEDS.to_json())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is not JSON: Expecting value"),
        (b"\x97\x00", "it is not JSON: Expecting value"),
        (b"[1, 2]", "an object with 'calibration_version' was expected, not [1, 2]"),
        (b'{"verdict": "Communication takes 70 %"}', "'calibration_version' is missing"),
        (json.dumps({**WRITTEN, "calibration_version": 2}).encode(), "its version is 2, not 3"),
        (json.dumps({**WRITTEN, "costs": {"int8": 3}}).encode(), "'int8' must be dict, not 3"),
        (json.dumps({**WRITTEN, "costs": {"int8": {}}}).encode(), "'work_ns_per_value' is missing"),
        (json.dumps({**WRITTEN, "load_average": math.nan}).encode(), "NaN is not a number that JSON allows"),
        (json.dumps({**WRITTEN, "num_cores": 0}).encode(), "'num_cores' must be from 1 to 1e+06, not 0"),
        (b"[" * 100_000, "it is nested too deeply"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_with_the_reason(tmp_path, content, why):
    path = tmp_path / "speeds.json"
    path.write_bytes(content)
    result = plan("--parameters", "1e6", "--compute-ms", "10", "--calibration", str(path))
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert f"{path.name} is not a calibration of this gradwire: " in said
    assert why in said
    assert "or the name of a new one: it is measured and written" in said


def test_speeds_that_were_measured_on_a_busy_machine_are_warned_of(tmp_path):
    path = tmp_path / "speeds.json"
    for cores, load, warned in ((2, 0.4, False), (2, 3.5, True), (64, 3.5, False), (2, None, False)):
        path.write_text(replace(SPEEDS, num_cores=cores, load_average=load).to_json())
        result = plan("--parameters", "1e6", "--compute-ms", "10", "--calibration", str(path), "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout)
        assert (f"a load average of {load}" in " ".join(result.stderr.split())) == warned


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
    assert "allreduce" in plan(*options, "--recipe", "noop").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "1e6"], "--compute-ms must be given"),
        (["--compute-ms", "10"], "give --parameters or --model"),
        (["--compute-ms", "nan", "--parameters", "9"], "--compute-ms must be above 0 and finite, not nan"),
        (["--compute-ms", "-4", "--parameters", "9"], "--compute-ms must be above 0 and finite, not -4"),
        (["--compute-ms", "10", "--parameters", "0"], "must be from 1 to 1e+13, not 0"),
        (["--compute-ms", "10", "--parameters", "inf"], "must be from 1 to 1e+13, not inf"),
        (["--model", "torch.nn:ReLU", "--compute-ms", "10"], "loss function, not ReLU"),
        (["--model", "torch.nn:Linear", "--compute-ms", "10"], "torch.nn:Linear raises TypeError: "),
        (
            ["--calibration", "/no/folder/a.json"],
            "cannot write /no/folder/a.json: there is no folder /no/folder",
        ),
        (
            ["--calibration", "/", *("--compute-ms", "10", "--parameters", "9")],
            "cannot read /: Is a directory",
        ),
        (["--compute-ms", "10", "--parameters", "9", "--nodes", "two"], "--nodes takes numbers"),
        (["--compute-ms", "10", "--parameters", "9", "--link", "fast"], "such as 100mbit"),
        (["--compute-ms", "10", "--parameters", "9", "--link", ""], "such as 100mbit"),
        (["--validate", "--nodes", "2,5"], "--validate measures 2, 3, 4, 8, 16 hosts, not 5; for other"),
        (["--validate", "--nodes", "5", "--link", "fast"], "such as 100mbit"),
        (["--validate", "--nodes", "2,1", "--link", "1gbit"], "--validate measures 2 or more hosts, not 2,1"),
        (["--recipe", "bf61"], "did you mean 'bf16'"),
        (["--recipe", "schedule(0=bf16; 9=int4)"], "is several recipes: plan each of them by itself"),
        (["--compute-ms", "10", "--parameters", "9", "--bucket-mb", "0"], "--bucket-mb must be above 0"),
        (["--compute-ms", "10", "--parameters", "9", "--latency-us", "inf"], "latency must be at least 0"),
        (["--compute-ms", "10", "--parameters", "9", "--bucket-mb", "inf"], "above 0 and finite, not inf"),
        (["--parameters", "350M"], "(Number of parameters, such as 19e6; stands for a transformer of that"),
        (["--delay", "20ms"], "(With an outer loop: steps from the start of an averaging to its end)"),
        (["--compute-ms", "10", "--parameters", "9", "--delay", "2"], "give its --period or --fragments"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    result = plan(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sharding", "fsdp", "--recipe", "powersgd"], "whole matrices"),
        (["--sharding", "fsdp", "--weights", "int2"], "weights='int2' cannot encode parameters"),
        (["--period", "3", "--fragments", "8"], "a period of 3 steps is too short for 8 fragments"),
        (["--period", "3", "--delay", "8"], "a delay of 8 steps is not less than the period of 3"),
        (["--period", "3", "--recipe", "topk:momentum=0.9"], "leave momentum= out"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_the_machine_is_measured(arguments, message, monkeypatch):
    monkeypatch.setattr(calibrations, "calibrate", lambda *_: pytest.fail("the machine is measured"))
    result = plan("--compute-ms", "10", "--parameters", "1e6", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_file_without_the_speeds_of_a_recipe_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(SPEEDS.to_json())
    options = ["--compute-ms", "10", "--parameters", "1e6", "--calibration", str(path)]
    result = plan(*options, "--recipe", "int8:block=64", "--recipe", "bf16")
    assert result.exit_code == 2
    assert f"{path} has no speeds of int8:block=64, only of " in result.stderr
    assert "Remove it, or name a new file" in result.stderr


def test_nothing_is_measured_for_a_recipe_that_is_not_calibrated():
    speeds = Calibration("a machine", "2.13", {"bf16": SOME}, num_cores=2)
    with pytest.raises(ValueError, match="the calibration has no 'int8', only bf16"):
        validate(["bf16", "int8"], speeds, lambda case: pytest.fail(f"{case} is measured"))


def test_predictions_are_validated_with_any_number_of_hosts_if_the_link_is_given():
    options = PlanOptions(nodes="5,16", link="20mbit")
    assert [str(case) for case in options.lab_cases()] == [
        "5 hosts with links of 20mbit",
        "16 hosts with links of 20mbit",
    ]
    assert [case.link for case in PlanOptions(nodes="8").lab_cases()] == ["200mbit"]
    assert all(case.link == "1gbit" for case in PlanOptions(link="1gbit").lab_cases())


class Words(torch.nn.Module):
    """Two tables, a matrix, a convolution in another order of memory, and a parameter in 16 bits."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden = torch.nn.Embedding(600, 48), torch.nn.Linear(48, 48)
        self.conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.head, self.frozen = torch.nn.Linear(48, 600), torch.nn.Linear(48, 48).requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))

    def forward(self, words):
        seen = self.frozen(self.hidden(self.embed(words)))
        return self.head(seen).square().mean() + self.conv(torch.ones(1, 3, 3, 3)).mean() + self.scale.sum()


def make_words():
    return Words(), torch.arange(5), lambda loss: loss


def bytes_of_wires(rank, names):
    """Return the bytes that this rank sends in steps of each recipe, the mean of an even and an odd one."""
    found = {}
    for name in names:
        model = DistributedDataParallel(Words(), bucket_cap_mb=0.05)
        wire = gradwire.attach(model, name)
        for _ in range(4):
            model(torch.arange(5) + rank).backward()
        last = wire.stats().steps[-2:]
        found[name] = sum(b.bytes_sent for step in last for b in step.buckets) / 2
        wire.detach()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_plan_of_a_model_has_the_bytes_that_a_wire_of_it_counts(world_size):
    ranks = run_ranks(bytes_of_wires, world_size, 240, args=(NAMES,))
    for name in NAMES:
        counted = max(rank[name] for rank in ranks)
        # DDP's buckets after its first step may have other parameters. Blocks of topk are never cut short.
        rel = 0.01 if name == "topk" else 0.005
        planned = sent(name, Words(), Cluster(world_size), bucket_mb=0.05)
        assert planned == pytest.approx(counted, rel=rel), name


def test_the_command_plans_the_tables_of_a_model_as_attach_sends_them(tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(SPEEDS.to_json())
    options = [
        "--compute-ms",
        "10",
        "--calibration",
        str(path),
        "--nodes",
        "2",
        "--recipe",
        "powersgd",
        "--json",
    ]
    result = plan("--model", f"{__name__}:make_words", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)[-1]
    # The tables alone hold 58,200 values, in four bits with a scale for each block.
    assert found["bytes_per_step"] > 58_200 / 2
    assert found["bytes_per_step"] == pytest.approx(sent("powersgd", Words(), Cluster(2)), abs=1)


def test_tables_average_within_a_node_and_low_rank_does_not():
    nodes = Cluster(num_nodes=4, workers_per_node=2, bits_per_s=1e9)
    module = torch.nn.Sequential(torch.nn.Embedding(600, 48), torch.nn.Linear(48, 200, bias=False))
    whole, tables, others = (
        step_traffic(name, model, nodes).buckets[0]
        for name, model in (("powersgd", module), ("int4", [(600, 48)]), ("powersgd", [(200, 48)]))
    )
    for figure in ("num_values", "worker_bytes", "node_bytes", "num_rounds", "num_messages", "num_trips"):
        assert getattr(whole, figure) == getattr(tables, figure) + getattr(others, figure), figure
