"""Scripts that use a framework, started in every way that the docs promise."""

import pytest
import torch

from gradwire.headroom import read_records
from tests.frameworks.scripts import PAUSING, TORCHRUN, example, run, run_until, run_well, weights

RECIPE = "int4"
RUN = ["-m", "gradwire", "run", "--recipe", RECIPE]
AS_RANK = ["-m", "gradwire.run", "--recipe", RECIPE]
# With --cpu it would start one process; the scripts choose the CPU themselves.
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
ACCELERATE += ["--main_process_port", "0"]  # any that is free
FULL = pytest.mark.full
STEPS = 16
"""Steps of two epochs: 128 rows in batches of 8 on two ranks."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run an example to the end, unchanged, once; return its folder and what it said."""
    folders = {}

    def run_whole(name):
        if name not in folders:
            folder = tmp_path_factory.mktemp(name)
            # Ray starts its workers itself.
            ranks = [] if name == "ray" else ["--ranks", "2"]
            folders[name] = folder, run_well([*RUN, *ranks, "--", example(name), "--folder", folder], folder)
        return folders[name]

    return run_whole


def assert_averaged(said):
    assert said.count(f"gradwire {RECIPE}: {STEPS} steps") == 1, said[-4000:]
    assert "sent by rank 0 instead of" in said
    assert "no errors" in said


@pytest.mark.parametrize("name", ["lightning", "fabric", "accelerate", "transformers", "ray"])
def test_gradwire_run_takes_a_script_without_a_change(whole, name):
    _, said = whole(name)
    assert_averaged(said)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("lightning", [*TORCHRUN, *AS_RANK]),
        ("accelerate", [*ACCELERATE, *AS_RANK]),
        pytest.param("transformers", [*ACCELERATE, *AS_RANK], marks=FULL),
        ("lightning", [*RUN, "--"]),  # Lightning starts the other rank
        ("fabric", [*RUN, "--"]),
    ],
    ids=[
        "lightning-torchrun",
        "accelerate-launch",
        "transformers-launch",
        "lightning-itself",
        "fabric-itself",
    ],
)
def test_other_launchers_take_a_script_without_a_change(whole, tmp_path, name, command):
    assert_averaged(run_well([*command, example(name), "--folder", tmp_path], tmp_path))
    assert torch.equal(weights(tmp_path), weights(whole(name)[0]))


@pytest.mark.parametrize(
    ("name", "launcher", "checkpoint"),
    [
        ("lightning", [], "epoch=0.ckpt"),
        ("fabric", [], "epoch=0.ckpt"),
        ("accelerate", TORCHRUN, "epoch=0"),
        ("transformers", TORCHRUN, "checkpoint-8"),
    ],
)
def test_a_script_that_is_killed_and_resumed_ends_as_one_that_was_not(
    whole, tmp_path, name, launcher, checkpoint
):
    script = [example(name), "--recipe", RECIPE, "--folder", tmp_path]
    step = STEPS // 2 + 2
    (tmp_path / "pausing.py").write_text(PAUSING.format(step=step))
    run_until([*launcher, tmp_path / "pausing.py", *script], tmp_path, line=f"step {step}")
    assert not (tmp_path / "weights.pt").exists()
    said = run_well([*launcher, *script, "--resume", tmp_path / checkpoint], tmp_path)
    assert f"trained {STEPS} steps in all" in said
    assert torch.equal(weights(tmp_path), weights(whole(name)[0]))


def test_workers_of_ray_save_and_resume_their_states(whole, tmp_path):
    run_well([example("ray"), "--recipe", RECIPE, "--folder", tmp_path, "--fail-after", "1"], tmp_path)
    assert torch.equal(weights(tmp_path), weights(whole("ray")[0]))


@pytest.mark.parametrize(
    "name",
    ["lightning", "transformers", *(pytest.param(name, marks=FULL) for name in ("fabric", "accelerate"))],
)
def test_headroom_measures_a_script_without_a_change(tmp_path, name):
    record = tmp_path / "record.json"
    options = ["--ranks", "2", "--recipe", "noop", "--steps", "6", "--budget", "0.1", "--json", record, "--"]
    run_well(["-m", "gradwire", "headroom", *options, example(name), "--folder", tmp_path], tmp_path)
    (found,) = read_records(record.read_text())
    assert [row.recipe for row in found.rows] == ["allreduce", "noop"]
    assert found.proposal is not None, "its model's gradients were looked at when the framework was done"


def test_headroom_refuses_ray_at_once(tmp_path):
    command = ["-m", "gradwire", "headroom", "--ranks", "1", "--recipe", RECIPE, "--"]
    code, said = run([*command, example("ray"), "--folder", tmp_path], tmp_path)
    assert code == 1
    assert "Ray starts workers of its own" in said


NOTEBOOK = """
import sys
import torch
from accelerate import Accelerator, notebook_launcher

def train(recipe=None):
    print("a rank trains")
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(40, 5)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if recipe is not None:
        from gradwire.adapters.accelerate import attach
        wire = attach(accelerator, model, recipe)
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 40)).square().mean())
        optimizer.step()
    if recipe is not None:
        accelerator.print(f"gradwire {recipe}: {wire.stats().num_steps} steps")

if __name__ == "__main__":
    any_port = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
    notebook_launcher(train, sys.argv[1:], num_processes=2, **any_port)
"""


@pytest.mark.parametrize("command", [[*RUN, "--", "train.py"], ["train.py", RECIPE]], ids=["run", "adapter"])
def test_ranks_of_the_notebook_launcher_are_attached_to(tmp_path, command):
    (tmp_path / "train.py").write_text(NOTEBOOK)
    said = run_well(command, tmp_path)
    assert said.count(f"gradwire {RECIPE}: 3 steps") == 1, said[-4000:]


@pytest.mark.parametrize(
    "command", [["run", "--ranks", "2"], ["headroom", "--recipe", RECIPE]], ids=["run", "headroom"]
)
def test_the_notebook_launcher_in_every_rank_is_refused_at_once(tmp_path, command):
    (tmp_path / "train.py").write_text(NOTEBOOK)
    code, said = run(["-m", "gradwire", *command, "--", "train.py"], tmp_path)
    assert code == 1
    assert "the script starts processes itself" in said
    assert "a rank trains" not in said


LIGHTNING_NOTEBOOK = """
import sys
import lightning.pytorch as pl
import torch

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(40, 5)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_train_end(self):
        if hasattr(self.trainer.strategy, "wire") and self.trainer.is_global_zero:
            print(f"gradwire int4: {self.trainer.strategy.wire.stats().num_steps} steps", flush=True)

if __name__ == "__main__":
    strategy = "ddp_notebook"
    if sys.argv[1] != "plain":
        from gradwire.adapters.lightning import WireStrategy
        strategy = WireStrategy("int4", start_method=sys.argv[1])
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=3, **options)
    trainer.fit(Module(), torch.ones(16, 2, 40))
"""


@pytest.mark.parametrize(
    "command",
    [
        [*RUN, "--", "train.py", "plain"],
        pytest.param(["train.py", "fork"], marks=FULL),
        ["train.py", "spawn"],
    ],
    ids=["run", "fork", "spawn"],
)
def test_ranks_that_lightning_starts_from_a_notebook_are_attached_to(tmp_path, command):
    (tmp_path / "train.py").write_text(LIGHTNING_NOTEBOOK)
    said = run_well(command, tmp_path)
    assert said.count(f"gradwire {RECIPE}: 3 steps") == 1, said[-4000:]
