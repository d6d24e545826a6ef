"""`gradwire run`: scripts as they are, with a recipe in every model they make."""

import logging
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.testing import run_ranks

TRAIN = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(400, 50))
how = sys.argv[1]
if how == "hook":
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    model.register_comm_hook(None, fp16_compress_hook)
if how == "attach":
    import gradwire
    wire = gradwire.attach(model, "fp16")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    model(torch.randn(3, 400)).square().mean().backward()
    optimizer.step()
    if how == "fail" and step == 2:
        raise KeyError("no such batch")
if how == "attach":
    print("its own", wire.stats().num_steps)
sys.stdout.write(f"{__name__} {sys.argv}\\n")
dist.destroy_process_group()
sys.exit(3 if how == "exit" else 0)
"""


def run_alone(rank, path, hows, recipe="bf16"):
    """Run the script once in each way, and return its exit codes and its output."""
    dist.destroy_process_group()  # the script makes its own
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    results = {}
    for how in hows:
        logging.getLogger().handlers.clear()  # they write to the stderr of the run before
        result = CliRunner().invoke(app, ["run", "--recipe", recipe, path, how])
        results[how] = result.exit_code, result.stdout, result.stderr
        if dist.is_initialized():
            dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "train.py"
    path.write_text(TRAIN)
    (results,) = run_ranks(run_alone, 1, args=(str(path), ("hook", "attach", "fail", "exit")))
    return results


def test_an_unmodified_script_averages_by_the_recipe_and_is_summed_up(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    command = ["-m", "gradwire", "run", "--ranks", "2", "--recipe", "bf16", "train.py", "train", "--lr", "1"]
    done = subprocess.run(
        [sys.executable, *command], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("__main__ ['train.py', 'train', '--lr', '1']") == 2
    # 20050 values: 80.2 kB a step each way in fp32.
    expected = "gradwire bf16: 5 steps, 200.5 kB sent by rank 0 instead of 401.0 kB (50% saved), no errors"
    assert done.stderr.count(expected) == 1


def run_turned_off(rank, path):
    os.environ["GRADWIRE_DISABLE"] = "1"
    try:
        return run_alone(rank, path, ("plain",))
    finally:
        del os.environ["GRADWIRE_DISABLE"]


def test_a_run_that_is_turned_off_says_so_and_blames_nobody(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    (results,) = run_ranks(run_turned_off, 1, args=(str(path),))
    code, _, said = results["plain"]
    assert code == 0
    assert "gradwire bf16: 1 model left to torch, because GRADWIRE_DISABLE is set" in said
    assert "averaged 0 steps" not in said


def test_a_recipe_that_averages_nothing_is_not_praised_for_what_it_saves(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (results,) = run_ranks(run_alone, 1, args=(str(tmp_path / "train.py"), ("train",), "noop"))
    _, _, said = results["train"]
    assert "gradwire noop: 5 steps, and nothing averaged: each rank trained alone" in said
    assert "saved" not in said


def test_a_hook_of_the_scripts_own_wins_with_a_warning(runs):
    code, _, said = runs["hook"]
    assert code == 0, said
    assert said.count("the script registers its own hook, which is used instead of bf16") == 1
    assert "gradwire bf16: 1 taken over by a hook of the script's own" in said


def test_an_attach_of_the_scripts_own_wins_too(runs):
    code, printed, said = runs["attach"]
    assert code == 0, said
    assert printed.count("its own 5") == 1
    assert "1 taken over by a hook of the script's own" in said


def test_a_script_that_fails_fails_as_it_would_alone(runs):
    code, _, said = runs["fail"]
    assert code == 1
    assert "KeyError: 'no such batch'" in said
    assert said.count('  File "') == 1, "frames that are not the script's are of no use to its author"
    assert "gradwire bf16: 3 steps" in said


def test_the_exit_code_is_the_scripts(runs):
    assert runs["exit"][0] == 3


def test_a_run_with_one_rank_says_that_there_is_nobody_to_send_to(runs):
    only = "5 steps, 0 bytes sent by rank 0, the only one (start more with --ranks or torchrun), no errors"
    assert only in runs["exit"][2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "bf61", __file__], "did you mean 'bf16'"),
        (["no-such-script.py"], "there is no script no-such-script.py"),
        ([], "which script?"),
        (["-m", "no.such.module"], "there is no module no.such.module"),
        (["--state-every", "5", __file__], "--state-every goes with --state"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_script_may_clear_its_environment(tmp_path):
    before = dict(os.environ)
    (tmp_path / "plain.py").write_text("import os, sys; os.environ.clear(); sys.exit(5)")
    result = CliRunner().invoke(app, ["run", str(tmp_path / "plain.py")])
    os.environ.update(before)
    assert result.exit_code == 5, result.output


def test_a_script_without_a_model_keeps_its_exit_code(tmp_path):
    (tmp_path / "plain.py").write_text("import sys; sys.exit(5)")
    result = CliRunner().invoke(app, ["run", str(tmp_path / "plain.py")])
    assert result.exit_code == 5
    assert "no model trained with it (none made)" in result.stderr
