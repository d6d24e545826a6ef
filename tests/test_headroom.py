"""Headroom: workloads, the table, and the command on real ranks."""

import dataclasses
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import gradwire
from gradwire.cli import app
from gradwire.headroom import (
    Benchmark,
    ModelFactory,
    Workload,
    describe_proposal,
    give_verdict,
    measure_here,
    measure_steps,
    read_records,
    step_table,
)
from gradwire.headroom.benchmark_rank import run_benchmark
from gradwire.headroom.devices import local_gpu
from gradwire.headroom.script_rank import _EnoughSteps, _Stopwatch
from gradwire.headroom.timed_models import TimedModel
from gradwire.planner import Cluster, shapes_of, step_traffic
from gradwire.scripts import Script
from gradwire.testing import run_ranks
from tests.processes import is_alive, wait_until_gone
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


def test_a_factory_that_cannot_be_used_is_explained():
    with pytest.raises(ValueError, match=r"package.module:factory, not 'train'"):
        ModelFactory("train")
    with pytest.raises(ValueError, match="cannot import no_such_module:make"):
        ModelFactory("no_such_module:make")
    with pytest.raises(
        TypeError, match="must return a model, a batch and a loss function, not Bilinear, tuple"
    ):
        ModelFactory(f"{__name__}:no_loss").build()
    with pytest.raises(ValueError, match="SCRIPT must be a function, not str"):
        ModelFactory(f"{__name__}:SCRIPT")


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
    result = run("headroom", *TINY, "--bucket-mb", "0.01", "--budget", "0.15", "--json", str(path))
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
    assert 0.002 < proposed.error < 0.15
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
        (["--seconds", "-3"], "--seconds must be above 0"),
        (["--json", "no-such-folder/record.json"], "cannot write no-such-folder/record.json"),
        (["--ranks", "0"], "--ranks"),
        (["--link", "fast"], "such as 100mbit"),
        (["--model", "train"], "package.module:factory"),
        (["--model", "nothing:x"], "cannot import nothing:x: No module named"),
        (["--device", "tpu"], "the device must be cpu or cuda, not 'tpu'"),
        (["--", "no-such-script.py"], "there is no script no-such-script.py"),
        (["--device", "cpu", "--", __file__], "a script makes its own models, on its own devices"),
    ],
)
def test_wrong_arguments_end_with_2_before_anything_runs(arguments, message):
    result = run("headroom", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


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


def fail_on_ranks(*arguments, **options):
    return run_ranks(run_out_of_memory, 2)


def run_out_of_memory(rank):
    raise MemoryError("the memory is full")


def test_progress_counts_up_to_the_end():
    seen = []
    workload = Workload(width=8, num_layers=1, sequence=2)
    benchmark = Benchmark(["bf16"], workload, num_steps=4)
    measured = measure_steps(benchmark, 1, on_progress=lambda *step: seen.append(step))
    assert [row.recipe for row in measured.rows] == ["allreduce", "bf16", "noop"]
    assert seen == sorted(seen)
    assert seen[-1] == (21, 21)  # three rows, three steps to warm up and four timed


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


SCRIPT = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(300, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    model(torch.randn(3, 300)).square().mean().backward()
    optimizer.step()
print("the script's own end")
"""


@pytest.mark.full
def test_a_script_that_ends_too_early_is_explained(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run("headroom", "--ranks", "1", "--steps", "8", "--", str(tmp_path / "train.py"), "5")
    assert result.exit_code == 1
    assert "ended after 5 optimizer steps with allreduce; 12 are needed" in result.stderr
    assert "or time fewer steps: --steps 1" in result.stderr


def test_a_script_that_leaves_its_process_is_explained(tmp_path):
    (tmp_path / "leave.py").write_text("import os; os._exit(0)")
    result = run("headroom", "--ranks", "1", "--", str(tmp_path / "leave.py"))
    assert result.exit_code == 1
    assert "the script left its process (os._exit) before it had taken enough steps" in result.stderr


def test_a_step_that_calls_several_optimizers_is_one_step():
    stopwatch, matrices, others = _Stopwatch(num_steps=2), object(), object()
    for _ in range(2):
        stopwatch(matrices)
        stopwatch(others)
    with pytest.raises(_EnoughSteps):
        stopwatch(matrices)
    assert len(stopwatch.ends_s) == 3


ENDLESS = """
import os, subprocess, sys, time
from pathlib import Path
here = Path(__file__).with_name("told")
if os.environ["RANK"] == "1":
    while not here.exists():
        time.sleep(0.01)
child = subprocess.Popen(["sleep", "1000"])
print("pids", os.getpid(), child.pid, flush=True)
here.touch()
if os.environ["RANK"] == "1" and sys.argv[1:] == ["fail"]:
    sys.exit(3)
time.sleep(1000)
"""


def pids_in(lines):
    return [int(pid) for line in lines if line.startswith("pids") for pid in line.split()[1:]]


def test_when_a_rank_of_a_script_fails_all_end_with_what_they_have_started(tmp_path, capfd):
    (tmp_path / "endless.py").write_text(ENDLESS)
    result = run("headroom", "--", str(tmp_path / "endless.py"), "fail")
    assert result.exit_code == 1
    assert "the script ended with exit code 3 on rank 1; its output says why" in result.stderr
    pids = pids_in(capfd.readouterr().out.splitlines())
    assert len(pids) == 4
    wait_until_gone(pids)


@pytest.mark.full
def test_a_script_and_what_it_has_started_end_with_whoever_measures_it(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    command = [sys.executable, "-m", "gradwire", "headroom", "--", str(tmp_path / "endless.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as measuring:
        try:
            pids = pids_in([measuring.stdout.readline(), measuring.stdout.readline()])
            assert len(pids) == 4
            assert all(map(is_alive, pids))
        finally:
            measuring.kill()
    wait_until_gone(pids)


def test_words_of_a_command_line_name_a_script_or_a_module():
    assert Script.of(["python3", "-m", "json.tool", "x"], is_module=False) == Script(
        "json.tool", ("x",), is_module=True
    )
    assert Script.of(["-m", "json.tool"], is_module=False).is_module
    assert Script.of(["python", __file__], is_module=False) == Script(__file__)


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
    benchmark = Benchmark(["fp32"], ModelFactory(f"{__name__}:with_dropout"), num_steps=2)
    return measure_here(benchmark)


def test_ranks_that_are_there_already_measure_together_and_the_first_has_the_record():
    measured, nothing = run_ranks(measure_in_a_group_of_ones_own, 2)
    assert nothing is None
    assert (measured.world_size, measured.interleaved) == (2, True)
    assert (measured.num_parameters, measured.gradient_bytes) == (6808, 8 * 6808)
    assert "with_dropout, 6.81k parameters" in measured.workload
    # Each row sees the same dropout, so only the averaging makes errors.
    assert {row.recipe: row.gradient_error for row in measured.rows}["fp32"] < 1e-6


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


def torchrun(folder, *arguments):
    """Return the record that rank 0 of two writes, and the output."""
    path = folder / "record.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--recipe", "bf16", "--steps", "8", "--json", str(path)]
    done = subprocess.run(
        [*command, "-m", "gradwire", "headroom", *options, *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (measured,) = read_records(path.read_text())
    return measured, done.stdout


@pytest.mark.full
def test_torchrun_gives_the_ranks_it_has(tmp_path):
    measured, shown = torchrun(tmp_path, "--width", "32", "--layers", "1", "--sequence", "4")
    assert shown.count("2 ranks over gloo") == 1
    assert [row.recipe for row in measured.rows] == ["allreduce", "bf16", "noop"]
    assert (measured.world_size, measured.one_machine, measured.interleaved) == (2, True, True)
    assert measured.rows[1].bytes_per_step == pytest.approx(measured.gradient_bytes / 2, rel=0.01)


def test_a_script_is_measured_as_it_is_and_ended_at_the_same_step(tmp_path, capfd):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--recipe", "noop", "--steps", "2", "--json", "-"]
    result = run("headroom", *options, "--", str(tmp_path / "train.py"), "100000")
    assert result.exit_code == 0, result.output
    (measured,) = read_records(result.stdout)
    assert "Rows ran one after the other" in result.stderr
    assert "the script's own end" not in capfd.readouterr().out
    assert [row.recipe for row in measured.rows] == ["allreduce", "noop"]
    assert {len(row.samples_ms) for row in measured.rows} == {2}
    assert [row.bytes_per_step for row in measured.rows] == [4 * 15050, 0]
    assert (measured.num_parameters, measured.gradient_bytes) == (15050, 4 * 15050)
    assert (measured.world_size, measured.backend, measured.interleaved) == (2, "gloo", False)


@pytest.mark.full
def test_a_script_is_measured_under_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    measured, shown = torchrun(tmp_path, "--", "train.py", "100000")
    assert "the script's own end" not in shown
    assert [row.recipe for row in measured.rows] == ["allreduce", "bf16", "noop"]
    assert measured.gradient_bytes == 4 * 15050
    assert [row.bytes_per_step for row in measured.rows] == [4 * 15050, 2 * 15050, 0]
    assert (measured.world_size, measured.backend, measured.interleaved) == (2, "gloo", False)
