"""Headroom of scripts as they are, and under torchrun."""

import dataclasses
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import gradwire
from gradwire.cli import app
from gradwire.headroom import read_records
from gradwire.headroom.script_launchers import ScriptFailed
from gradwire.headroom.script_rank import _EnoughSteps, _Stopwatch
from gradwire.headroom.script_task import ScriptResult, ScriptTask, WireTotals
from gradwire.headroom.scripts import _check, _without_refused
from gradwire.scripts import Script
from tests.processes import is_alive, wait_until_gone
from tests.report_records import tuned


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


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


def result(num_models, num_refused):
    wires = WireTotals(num_models, num_refused, 100, 2, 0.1, 0.1, 1000, 4000, 2000, "fsdp")
    return ScriptResult((0.1,) * 20, 1, "gloo", "cpu", 21, wires)


def test_the_decisions_of_a_scripts_models_come_back_from_its_rank():
    before, decisions = result(2, 0), tuned(num_models=2).rows[1].decisions
    before = dataclasses.replace(before, wires=dataclasses.replace(before.wires, decisions=decisions))
    assert ScriptResult.from_json(before.to_json()) == before


def test_a_recipe_that_models_cannot_have_is_left_out():
    names = {"int8": (2, 0), "powersgd": (0, 2), "topk": (1, 1), "noop": (2, 0)}
    runs = {gradwire.recipe(name): [result(*counts)] for name, counts in names.items()}
    for recipe, results in runs.items():
        _check(ScriptTask(Script(__file__), str(recipe), 19), results)
    assert [str(recipe) for recipe in _without_refused(runs)] == ["int8", "noop"]
    with pytest.raises(ScriptFailed, match="made no DistributedDataParallel or sharded model"):
        _check(ScriptTask(Script(__file__), "noop", 19), [result(0, 2)])


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
    assert measured.num_layers == 2, "a weight and a bias"
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
