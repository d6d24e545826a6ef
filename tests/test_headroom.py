"""Headroom: workloads, the table, and the command on real ranks."""

import contextlib
import dataclasses
import os
import re
from collections import Counter

import pytest
import torch
from rich.console import Console
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import gradwire
from gradwire.cli import app
from gradwire.headroom import (
    Benchmark,
    ModelFactory,
    Workload,
    benchmark_rank,
    describe_proposal,
    devices,
    give_verdict,
    measure_here,
    measure_steps,
    read_records,
    step_table,
)
from gradwire.headroom.benchmark_rank import run_benchmark
from gradwire.headroom.devices import local_gpu, takes_turns
from gradwire.headroom.measure import slowest_ms
from gradwire.headroom.proposals import propose_encodings
from gradwire.headroom.timed_models import TimedModel
from gradwire.headroom.typical_steps import sent_per_step, typical_ms
from gradwire.headroom.workloads import BuiltWorkload
from gradwire.planner import Cluster, shapes_of, step_traffic
from gradwire.telemetry import BucketStats, StepStats
from gradwire.testing import run_ranks
from tests.records import record

TINY = ["--width", "32", "--layers", "1", "--sequence", "4", "--steps", "4"]


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


# --- the workload ---


@pytest.mark.parametrize(
    "workload",
    [
        Workload(width=32, num_layers=2),
        Workload(width=8, num_layers=1),
        Workload("resnet", width=5, num_layers=3, sequence=4),
    ],
)
def test_a_workload_knows_how_many_parameters_it_has(workload):
    assert workload.num_parameters == sum(p.numel() for p in workload.model().parameters())
    built = workload.build()
    assert built.step_loss(built.model).shape == ()


def test_a_workload_that_cannot_be_built_is_refused():
    with pytest.raises(ValueError, match=r"the width must be a multiple of 8, .* not 20"):
        Workload(width=20)
    with pytest.raises(ValueError, match="num_layers must be at least 1, not 0"):
        Workload(num_layers=0)
    with pytest.raises(ValueError, match="the workload must be 'transformer' or 'resnet', not 'mlp'"):
        Workload("mlp")


def two_inputs():
    model = torch.nn.Bilinear(3, 4, 5)
    return model, (torch.randn(2, 3), torch.randn(2, 4)), lambda output: output.sum()


def named_inputs():
    model, (a, b), loss = two_inputs()
    return model, {"input1": a, "input2": b}, loss


def no_loss():
    return two_inputs()[:2]


@pytest.mark.parametrize("name", ["two_inputs", "named_inputs"])
def test_a_models_batch_is_one_argument_several_or_named_ones(name):
    built = ModelFactory(f"{__name__}:{name}").build()
    assert built.step_loss(built.model).shape == ()


def test_a_loss_that_is_no_tensor_of_one_value_is_refused():
    model = torch.nn.Linear(3, 4)
    for loss, found in (
        (lambda output: output.sum().item(), "float"),
        (lambda output: output, "shape (2, 4)"),
    ):
        with pytest.raises(TypeError, match=f"a tensor of one value, not {re.escape(found)}"):
            BuiltWorkload(model, torch.randn(2, 3), loss).step_loss(model)


def test_a_factory_that_cannot_be_used_is_explained(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"package.module:factory, not 'train'"):
        ModelFactory("train")
    with pytest.raises(ValueError, match="cannot import no_such_module:make"):
        ModelFactory("no_such_module:make")
    (tmp_path / "trains_at_import.py").write_text("raise RuntimeError('no rank here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match="importing trains_at_import raises RuntimeError: no rank here. Give"
    ):
        ModelFactory("trains_at_import:make")
    with pytest.raises(
        TypeError, match="must return a model, a batch and a loss function, not Bilinear, tuple"
    ):
        ModelFactory(f"{__name__}:no_loss").build()
    with pytest.raises(ValueError, match="TINY must be a function, not list"):
        ModelFactory(f"{__name__}:TINY")


# --- the table ---


def text_of(table):
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_table_shows_every_row_and_the_conditions():
    shown = record(world_size=4, allreduce=100, fp32=98, bf16=80, noop=50)
    lines = text_of(step_table(shown)).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["allreduce"][1:] == ["100.0", "99.5-100.4", "1.0", "MB", "1.00x", "50%", "-"]
    assert rows["bf16"][1:] == ["80.0", "79.6-80.3", "1.0", "MB", "1.25x", "38%", "-"]
    assert rows["noop"][-3:] == ["2.00x", "-", "-"]
    assert "fp32" in rows
    text = " ".join(" ".join(lines).split())  # captions wrap at the table's width
    assert "4 ranks over gloo: transformer, 18.9M parameters, batch 2 x 64" in text
    assert "A CPU, 2 cores" in text
    assert "4 threads share 2 cores" in text
    assert "what a ring sends" in text


def test_a_long_name_takes_no_place_from_figures():
    long = "route(*.norm*=fp32; ndim<2=fp32; embed.* & numel>65536=int8; *=int4)"
    shown = text_of(step_table(record(allreduce=100, **{long: 80}, noop=50)))
    assert "…" not in shown
    assert "79.6-80.3" in shown
    assert "1.25x" in shown


def test_unknown_bytes_are_called_unknown():
    shown = record(allreduce=100, noop=50)
    hidden = tuple(dataclasses.replace(row, bytes_per_step=None) for row in shown.rows)
    assert "unknown" in text_of(step_table(dataclasses.replace(shown, rows=hidden)))


# --- the command ---


@pytest.fixture(scope="module")
def all_recipes(tmp_path_factory):
    """The record that the command writes on two ranks, and its output."""
    path = tmp_path_factory.mktemp("headroom") / "record.json"
    result = run("headroom", *TINY, "--bucket-mb", "0.01", "--budget", "0.3", "--json", str(path))
    assert result.exit_code == 0, result.output
    (measured,) = read_records(path.read_text())
    return measured, result


def test_the_command_measures_and_writes_what_it_shows(all_recipes):
    measured, result = all_recipes
    compared = ["fp32", "bf16", "int8", "int4", "int2", "sign", "powersgd"]
    assert [row.recipe for row in measured.rows] == ["allreduce", *compared, "noop"]
    assert measured.workload == str(Workload(width=32, num_layers=1, sequence=4))
    assert measured.gradient_bytes == 4 * Workload(width=32, num_layers=1).num_parameters
    assert (measured.world_size, measured.threads_per_rank, measured.backend) == (2, 1, "gloo")
    proposed = measured.proposal
    assert 0.002 < proposed.error < 0.3
    assert 0 < proposed.bytes_per_step < measured.allreduce.bytes_per_step / 3
    assert f"auto would send {proposed.bytes_per_step:,}" in result.stdout
    assert measured.bucket_mb == 0.01
    assert {len(row.samples_ms) for row in measured.rows} == {4}
    assert all(row.recipe in result.stdout for row in measured.rows)
    said = f"{give_verdict(measured)} {describe_proposal(measured)}"
    assert said == " ".join(result.stdout.split("\n\n")[-1].split())


def test_rows_differ_in_what_they_send_and_in_how_far_off_that_is(all_recipes):
    measured, _ = all_recipes
    sent = {row.recipe: row.bytes_per_step for row in measured.rows}
    assert sent["allreduce"] == measured.gradient_bytes
    assert sent["bf16"] == pytest.approx(sent["fp32"] / 2, rel=0.02)
    assert sent["noop"] == 0
    error = {row.recipe: row.gradient_error for row in measured.rows}
    assert error["fp32"] < 1e-6 < error["bf16"] < 1e-2 < error["int4"] < 0.2 < error["sign"]


def test_a_plan_has_the_bytes_and_messages_that_real_ranks_send(all_recipes):
    measured, _ = all_recipes
    shapes = shapes_of(Workload(width=32, num_layers=1).model())
    for row in measured.rows[1:-1]:
        buckets = step_traffic(row.recipe, shapes, Cluster(2), bucket_mb=0.01).buckets
        # Ranks differ by an alignment; the record has the rank that sends most.
        assert sum(b.worker_bytes for b in buckets) == pytest.approx(row.bytes_per_step, rel=0.03)
        assert sum(b.num_messages for b in buckets) == row.num_messages, row.recipe


def test_json_on_stdout_stands_alone():
    result = run("headroom", *TINY, "--ranks", "1", "--recipe", "bf16", "--recipe", "noop", "--json", "-")
    assert result.exit_code == 0, result.output
    (measured,) = read_records(result.stdout)
    assert [row.recipe for row in measured.rows] == ["allreduce", "bf16", "noop"]
    assert {row.bytes_per_step for row in measured.rows} == {0}
    assert "1 rank over gloo" in result.stderr
    assert "nothing to gain" in result.stderr


def test_quiet_prints_the_verdict_alone():
    result = run("headroom", *TINY, "--ranks", "1", "--recipe", "fp16:reduction=sum", "--quiet")
    assert result.exit_code == 0, result.output
    assert " ".join(result.stdout.split()).startswith("One rank has nobody to average with")
    assert not result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "bf61"], "there is no recipe 'bf61'; did you mean 'bf16' or 'fp16'?"),
        (["--recipe", "fp16:reduction=max"], "option 'reduction' must be mean or sum, not 'max'"),
        (["--width", "20"], "multiple of 8"),
        (["--bucket-mb", "0"], "--bucket-mb must be above 0"),
        (["--bucket-mb", "inf"], "--bucket-mb must be above 0 and finite"),
        (["--seconds", "-3"], "--seconds must be above 0"),
        (["--json", "no-such-folder/record.json"], "cannot write no-such-folder/record.json"),
        (["--ranks", "0"], "--ranks"),
        (["--link", "fast"], "such as 100mbit"),
        (["--model", "train"], "package.module:factory"),
        (["--model", "./models/gpt.py:make"], "not by a file: write gpt:make, in the folder of"),
        (["--model", "nothing:x"], "cannot import nothing:x: No module named"),
        (["--device", "tpu"], "the device must be cpu or cuda, not 'tpu'"),
        (["--", "no-such-script.py"], "there is no script no-such-script.py"),
        (["--device", "cpu", "--", __file__], "a script makes its own models, on its own devices"),
        (["--batch", "8", "--seconds", "9", "--", __file__], ": leave out --batch, --seconds"),
        (
            ["--model", "torch.nn:ReLU", "--batch", "8", "--layers", "2"],
            "--model makes the model and its batch: leave out --layers, --batch",
        ),
    ],
)
def test_wrong_arguments_end_with_2_before_anything_runs(arguments, message):
    result = run("headroom", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


def test_nothing_is_measured_while_gradwire_is_disabled(monkeypatch):
    monkeypatch.setenv("GRADWIRE_DISABLE", "1")
    for subject in ([], ["--", __file__]):
        result = run("headroom", *subject)
        assert result.exit_code == 2
        assert "GRADWIRE_DISABLE is set, so that no recipe can be measured: unset it" in result.stderr


def test_ranks_of_a_lab_are_not_measured_each_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("headroom", *TINY)
    assert result.exit_code == 2
    assert "use --link instead of `gradwire lab`" in result.stderr


def test_a_failed_measurement_ends_with_1_and_the_ranks_errors(monkeypatch):
    monkeypatch.setattr("gradwire.cli.headroom.measure_steps", fail_on_ranks)
    result = run("headroom", *TINY)
    assert result.exit_code == 1
    assert "the measurement failed on ranks 0, 1:\nTraceback" in result.stderr
    assert result.stderr.count("MemoryError: the memory is full") == 1


def test_an_interrupted_measurement_writes_the_links_before(monkeypatch, tmp_path):
    path, links = tmp_path / "record.json", iter(["100mbit"])

    def measure(*arguments, **options):
        for link in links:
            return dataclasses.replace(record(allreduce=100, noop=50), link=link)
        raise KeyboardInterrupt

    monkeypatch.setattr("gradwire.cli.headroom.measure_steps", measure)
    monkeypatch.setattr("gradwire.cli.headroom.Lab", lambda *arguments: contextlib.nullcontext())
    result = run("headroom", *TINY, "--link", "100mbit,1gbit", "--json", str(path))
    assert result.exit_code == 130, result.output
    assert "interrupted; every rank is ended" in result.stderr
    assert [each.link for each in read_records(path.read_text())] == ["100mbit"]


def fail_on_ranks(*arguments, **options):
    return run_ranks(run_out_of_memory, 2)


def run_out_of_memory(rank):
    raise MemoryError("the memory is full")


def test_a_typical_step_is_not_the_last_one():
    """Scripts and benchmarks take the same: a pause at the end says nothing of other steps."""
    waits = [90.0, 90.0, 10.0, 11.0, 12.0, 10.0, 300.0]  # the first two with provisional buckets
    steps = [StepStats(i, (BucketStats(0, 100 + i % 2, 2, ms, None),)) for i, ms in enumerate(waits)]
    assert typical_ms(steps, "wait_ms") == 11
    assert typical_ms(steps, "work_ms") is None
    assert sent_per_step(steps, "bytes_sent") == 100.5
    assert typical_ms([], "wait_ms") is sent_per_step([], "bytes_sent") is None


def test_progress_counts_up_to_the_end():
    seen = []
    workload = Workload(width=8, num_layers=1, sequence=2)
    benchmark = Benchmark(["bf16"], workload, num_steps=4)
    measured = measure_steps(benchmark, 1, on_progress=lambda *step: seen.append(step))
    assert [row.recipe for row in measured.rows] == ["allreduce", "bf16", "noop"]
    assert seen == sorted(seen)
    assert seen[-1] == (21, 21)  # three rows, three steps to warm up and four timed


def job_measures_far_ranks(rank):
    """Return the last progress, and the numbers of the steps that are timed, of a rank that seems far."""
    benchmark_rank.longest_trip_s = lambda: 0.04
    num_steps, step, seen = Counter(), TimedModel.step, []

    def numbered_step(model):
        step(model)
        num_steps[model] += 1
        return num_steps[model]

    TimedModel.step = numbered_step
    benchmark = Benchmark(["bf16"], Workload(width=8, num_layers=1, sequence=2), num_steps=6)
    found = run_benchmark(benchmark, lambda *progress: seen.append(progress))
    return seen[-1], {each.times_s for each in found.measurements}


def test_on_far_links_a_turn_begins_with_steps_that_are_not_timed():
    # Three rows, of three steps to warm up, and turns of four and two timed steps, each after eight others.
    timed = {(12, 13, 14, 15, 24, 25)}
    assert run_ranks(job_measures_far_ranks, 2) == [((75, 75), timed)] * 2


def test_ranks_that_are_late_in_turn_are_not_counted_as_late_in_each_step():
    late_in_turn = [(0.006, 0.047, 0.006, 0.047, 0.005), (0.047, 0.006, 0.047, 0.006, 0.006)]
    assert slowest_ms(late_in_turn) == (47, 6, 47, 6, 6)
    assert slowest_ms([(0.02, 0.02, 0.02), (0.03, 0.03, 0.03)]) == (30, 30, 30)


def job_measures_at_times_to_order(rank):
    """Return the recipes that are tried with smaller buckets, if fp16 is fast in one step only."""
    num_steps, step = Counter(), TimedModel.step

    def step_of_a_known_time(model):
        step(model)
        name = str(model.variant.recipe)
        num_steps[name] += 1
        usual_s = {"powersgd:rank=1": 0.01, "int8": 0.1}.get(name, 0.2)
        return 0.001 if (name, num_steps[name]) == ("fp16", 2) else usual_s + 0.001 * rank

    TimedModel.step = step_of_a_known_time
    workload = Workload(width=32, num_layers=1, sequence=4)
    recipes = ["fp16", "int8", "powersgd:rank=1"]
    benchmark = Benchmark(recipes, workload, num_steps=1, small_bucket_mb=0.01)
    variants = [each.variant for each in run_benchmark(benchmark, lambda *progress: None).measurements]
    return [str(variant.recipe) for variant in variants if variant.bucket_mb == 0.01]


def test_smaller_buckets_are_tried_with_the_recipe_that_is_best_by_its_medians():
    # Low rank is faster than both, but would not be recommended.
    assert run_ranks(job_measures_at_times_to_order, 2) == [["None", "int8"]] * 2


def test_measuring_nothing_is_refused():
    for wrong in ({"num_steps": 0}, {"seconds": 0}, {"bucket_mb": -1}, {"device": "tpu"}):
        with pytest.raises(ValueError, match="must be"):
            Benchmark([], **wrong)


def test_recipes_are_listed_with_what_they_do():
    result = run("recipes")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in gradwire.RECIPES)
    assert "Send bf16; sum in fp32." in result.stdout


def test_version_and_help():
    assert f"gradwire {gradwire.__version__}" in run("--version").stdout
    helped = run("headroom", "--help").stdout
    assert "gradwire headroom --link 100mbit,1gbit" in helped
    assert "Exit codes: 0" in helped


class Dropout(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 400), torch.nn.Dropout(), torch.nn.Linear(400, 8)
        )

    def forward(self, values):
        return self.layers(values)


def with_dropout():
    return Dropout().double(), torch.randn(2, 8).double(), lambda output: output.square().mean()


def measure_in_a_group_of_ones_own(rank):
    recipes = ["fp32", "auto:bytes=6000"]
    benchmark = Benchmark(recipes, ModelFactory(f"{__name__}:with_dropout"), num_steps=10)
    return measure_here(benchmark)


def test_ranks_that_are_there_already_measure_together_and_the_first_has_the_record():
    measured, nothing = run_ranks(measure_in_a_group_of_ones_own, 2)
    assert nothing is None
    assert (measured.world_size, measured.interleaved) == (2, True)
    assert (measured.num_parameters, measured.gradient_bytes) == (6808, 8 * 6808)
    assert measured.num_layers == 2
    assert "with_dropout, 6.81k parameters" in measured.workload
    # Each row sees the same dropout, so only the averaging makes errors.
    assert {row.recipe: row.gradient_error for row in measured.rows}["fp32"] < 1e-6
    # The error belongs to the bytes beside it, which are those of the last steps.
    auto = measured.rows[2]
    ((*_, last),) = auto.decisions
    assert (auto.bytes_per_step, auto.gradient_error) == (last.bytes_per_step, last.error)
    assert not any(row.decisions for row in measured.rows if row is not auto)


def test_ranks_on_gpus_know_theirs_and_say_so_when_they_share_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert local_gpu(1, world_size=2) == torch.device("cuda", 1)
    assert "NCCL_HOSTID" not in os.environ
    # Under torchrun, only the ranks of this machine count.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_gpu(6, world_size=8) == torch.device("cuda", 0)
    assert "NCCL_HOSTID" not in os.environ
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert local_gpu(3, world_size=4) == torch.device("cuda", 1)
    assert (os.environ.pop("NCCL_HOSTID"), os.environ.pop("NCCL_SOCKET_IFNAME")) == ("3", "lo")


@pytest.mark.parametrize("at_once", [True, False])
def test_ranks_take_turns_where_they_share_a_gpu_and_no_service_runs(monkeypatch, at_once):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "runs_at_once", lambda environment: at_once)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert takes_turns("cuda", world_size=3) is not at_once
    assert not takes_turns("cuda", world_size=2)
    assert not takes_turns("cpu", world_size=3)
    # Under torchrun, only the ranks of this machine count.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not takes_turns("cuda", world_size=8)


def check_a_part_that_a_wrapper_renames(rank):
    proposed = []
    for wrap in (lambda part: part, checkpoint_wrapper):
        torch.manual_seed(rank)
        model = DistributedDataParallel(
            torch.nn.Sequential(wrap(torch.nn.Linear(64, 64)), torch.nn.Linear(64, 3))
        )
        with gradwire.attach(model, "noop") as wire:
            model(torch.randn(8, 64)).square().mean().backward()
            proposed.append(propose_encodings(wire, model.process_group, 0.1))
    assert proposed[0] == proposed[1]


def test_what_auto_would_send_does_not_depend_on_wrappers_in_the_model(two_ranks):
    two_ranks.run(check_a_part_that_a_wrapper_renames)


class Rotation(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))

    def forward(self, values):
        return (values.to(self.weight.dtype) @ self.weight).abs()


def check_complex_parameters(rank):
    model = DistributedDataParallel(Rotation())
    with gradwire.attach(model, "noop") as wire:
        model(torch.randn(8, 64)).square().mean().backward()
        proposed = propose_encodings(wire, model.process_group, 0.1)
    assert 0.002 < proposed.error < 0.1
    assert [number for _, number in proposed.counts] == [1]


def test_auto_would_send_complex_parameters_too(two_ranks):
    two_ranks.run(check_complex_parameters)
