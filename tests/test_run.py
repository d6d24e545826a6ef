"""`gradwire run`: scripts as they are, with a recipe in every model they make."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradwire.cli import app

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


def run(folder, *arguments, how, launcher=()):
    (folder / "train.py").write_text(TRAIN)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return subprocess.run(
        [sys.executable, *launcher, "-m", "gradwire.run", *arguments, "train.py", how, "--lr", "1"],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **({} if launcher else alone)},
    )


def test_an_unmodified_script_averages_by_the_recipe_and_is_summed_up(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(tmp_path, "--recipe", "bf16", how="train", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("__main__ ['train.py', 'train', '--lr', '1']") == 2
    # 20050 values: 80.2 kB a step each way in fp32.
    expected = "gradwire bf16: 5 steps, 200.5 kB sent by rank 0 instead of 401.0 kB (50% saved), no errors"
    assert done.stderr.count(expected) == 1


def test_a_hook_of_the_scripts_own_wins_with_a_warning(tmp_path):
    done = run(tmp_path, "--recipe", "bf16", how="hook")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the script registers a hook of its own, which is used instead of bf16") == 1
    assert "gradwire bf16: 1 taken over by a hook of the script's own" in done.stderr


def test_an_attach_of_the_scripts_own_wins_too(tmp_path):
    done = run(tmp_path, how="attach")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("its own 5") == 1
    assert "1 taken over by a hook of the script's own" in done.stderr


def test_a_script_that_fails_fails_as_it_would_alone(tmp_path):
    done = run(tmp_path, "--recipe", "bf16", how="fail")
    assert done.returncode != 0
    assert "KeyError: 'no such batch'" in done.stderr
    assert "gradwire bf16: 3 steps" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "bf61", __file__], "did you mean 'bf16'"),
        (["no-such-script.py"], "there is no script no-such-script.py"),
        ([], "which script?"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_script_without_a_model_keeps_its_exit_code(tmp_path):
    (tmp_path / "plain.py").write_text("import sys; sys.exit(5)")
    result = CliRunner().invoke(app, ["run", str(tmp_path / "plain.py")])
    assert result.exit_code == 5
    assert "no model trained with it (none made)" in result.stderr
