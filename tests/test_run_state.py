"""`gradwire run --state`: a script that resumes as scripts do keeps what its recipe remembers."""

import contextlib
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp import attach_to_all
from gradwire.scripts import ScriptStates
from tests.logs import logged

TRAIN = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, num_steps = dist.get_rank(), int(sys.argv[1])
torch.manual_seed(0)
net, step = torch.nn.Linear(40, 5), 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    step = saved["step"]
    net.load_state_dict(saved["net"])
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while step < num_steps:
    torch.manual_seed(1000 * rank + step)
    optimizer.zero_grad()
    model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
    step += 1
    if rank == 0 and step == int(sys.argv[2]):
        torch.save({"step": step, "net": net.state_dict()}, "checkpoint.pt")
if rank == 0:
    torch.save(net.state_dict(), sys.argv[3])
dist.destroy_process_group()
"""
RECIPE = "schedule(0=fp32; 2=int4)"


def train(rank, folder, steps, weights=None, *, loads_late=False, breaks_off=False, dropped=(), still=()):
    """Train as a script does; return its weights after each step, and its states.

    If it ``breaks_off``, one more step is averaged, and no optimizer takes it. The scaler drops the steps
    ``dropped``, and the learning rate of the steps ``still`` is 0.
    """
    states, saved = ScriptStates(folder, every=2), {}
    torch.manual_seed(0)
    net = nn.Linear(40, 5)
    if weights is not None and not loads_late:
        net.load_state_dict(weights)
    with attach_to_all(RECIPE, after_attach=states.add):
        model = DistributedDataParallel(net)
        if weights is not None and loads_late:
            net.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=bool(dropped))
        for step in steps:
            torch.manual_seed(1000 * rank + step)
            optimizer.zero_grad()
            factor = float("inf") if step in dropped else 1.0
            scaler.scale(model(torch.randn(8, 40)).square().mean() * factor).backward()
            optimizer.param_groups[0]["lr"] = 0.0 if step in still else 0.1
            scaler.step(optimizer)
            scaler.update(1.0)
            saved[step + 1] = {name: value.clone() for name, value in net.state_dict().items()}
        if breaks_off:
            model(torch.randn(8, 40)).square().mean().backward()
        states.end()
    return saved, states


def copied(rank, folder, name):
    """Copy a folder, so that a run leaves the files of the first as they are."""
    dist.barrier()  # the other rank may still write
    if rank == 0:
        shutil.copytree(folder, folder.with_name(name))
    dist.barrier()
    return folder.with_name(name)


def check_found(rank, path):
    folder = Path(path)
    folder.mkdir(exist_ok=True)
    whole, states = train(rank, folder, range(7))
    assert states.describe({2, 4, 6, 7}) == []
    assert "Use --state-every 1" in states.describe({3})[0]
    for stopped_at in (4, 7):
        for loads_late in (False, True):
            own, steps = copied(rank, folder, f"{stopped_at} {loads_late}"), range(stopped_at, 9)
            resumed, states = train(rank, own, steps, whole[stopped_at], loads_late=loads_late)
            assert states.describe(()) == [f"resumed at step {stopped_at} with the state in {own}"]
            for step in range(stopped_at + 1, 8):
                assert torch.equal(resumed[step]["weight"], whole[step]["weight"]), (stopped_at, step)
    for stopped_at in (0, 3):  # from scratch, and at a step without a state
        own = copied(rank, folder, f"{stopped_at}")
        _, states = train(rank, own, range(stopped_at, 5), whole.get(stopped_at))
        assert states.describe(()) == []


def test_the_state_of_the_weights_is_found_however_they_were_loaded(two_ranks, tmp_path):
    two_ranks.run(check_found, str(tmp_path / "first"))


def check_broken_off(rank, path):
    folder = Path(path)
    whole, _ = train(rank, folder, range(6))
    broken = folder / "broken"
    broken.mkdir(exist_ok=True)
    train(rank, broken, range(4), breaks_off=True)
    for _ in range(2):  # the second time, in the first step after resuming
        resumed, states = train(rank, broken, range(4, 6), whole[4])
        assert states.describe(()) == [f"resumed at step 4 with the state in {broken}"]
        assert torch.equal(resumed[6]["weight"], whole[6]["weight"])
        train(rank, broken, (), whole[4], breaks_off=True)


def test_a_step_that_no_optimizer_has_taken_leaves_the_state_before_it(two_ranks, tmp_path):
    two_ranks.run(check_broken_off, str(tmp_path))


def check_unmoved(rank, path):
    folder = Path(path)
    for name in ("dropped", "still"):
        own, unmoved = folder / name, {name: (2, 3, 6)}
        own.mkdir(exist_ok=True)
        whole, _ = train(rank, own, range(7), **unmoved)
        assert torch.equal(whole[2]["weight"], whole[4]["weight"])
        assert not torch.equal(whole[4]["weight"], whole[5]["weight"])
        for stopped_at in (4, 7):
            copy, steps = copied(rank, own, f"{name} {stopped_at}"), range(stopped_at, 9)
            resumed, states = train(rank, copy, steps, whole[stopped_at], **unmoved)
            assert states.describe(()) == [f"resumed at step {stopped_at} with the state in {copy}"]
            assert stopped_at == 7 or torch.equal(resumed[7]["weight"], whole[7]["weight"])


def test_a_step_that_leaves_the_weights_as_they_are_counts(two_ranks, tmp_path):
    two_ranks.run(check_unmoved, str(tmp_path))


def check_damaged(rank, path):
    folder = Path(path)
    whole, _ = train(rank, folder, range(5))
    dist.barrier()
    if rank == 1:
        for file in folder.glob("*-step4-*rank1*"):
            file.write_bytes(file.read_bytes()[:100])
    dist.barrier()
    with logged() as told:
        _, states = train(rank, folder, range(4, 6), whole[4])
    assert states.describe(()) == [], "no rank loads what one cannot read"
    found = [text for text in told if "is left out" in text]
    assert len(found) == rank
    assert all(
        "rank1of2.pt cannot be read: it is damaged, or holds more than tensors" in text for text in found
    )


def test_a_damaged_file_on_one_rank_is_loaded_by_none(two_ranks, tmp_path):
    two_ranks.run(check_damaged, str(tmp_path))


@contextlib.contextmanager
def full_disk():
    """Let this process write no more than a kilobyte to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_full_disk(rank, path):
    folder = Path(path)
    whole, _ = train(rank, folder, range(4))
    dist.barrier()
    before = sorted(folder.iterdir())
    with full_disk() if rank == 1 else contextlib.nullcontext(), logged() as told:
        goes_on, _ = train(rank, folder, range(4, 6), whole[4])
    assert torch.isfinite(goes_on[6]["weight"]).all()
    assert len(told) == (1 if rank == 1 else 0), told
    if rank == 1:
        assert (
            f"rank 1: the state of step 6 cannot be written to {folder}: [Errno 27] File too large" in told[0]
        )
    dist.barrier()
    after = [file for file in folder.iterdir() if file not in before]
    assert [file.name.split("-")[-1] for file in after] == ["rank0of2.pt"], "nothing half is left"


def test_a_full_disk_on_one_rank_ends_no_training(two_ranks, tmp_path):
    two_ranks.run(check_full_disk, str(tmp_path))


def run(folder, *options, steps, save_at, result):
    (folder / "train.py").write_text(TRAIN)
    command = ["-m", "gradwire", "run", "--ranks", "2", "--recipe", RECIPE, *options]
    command += ["train.py", str(steps), str(save_at), result]
    done = subprocess.run(
        [sys.executable, *command], check=False, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run the script whole, then from its checkpoint; return the folder and the outputs."""
    folder = tmp_path_factory.mktemp("state")
    state = ("--state", "states", "--state-every", "2")
    texts = {"whole": run(folder, *state, steps=7, save_at=4, result="whole.pt")}
    texts["resumed"] = run(folder, *state, steps=7, save_at=9, result="resumed.pt")
    return folder, texts


def is_same(folder, one, other):
    one, other = torch.load(folder / one), torch.load(folder / other)
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.full
def test_a_resumed_script_ends_with_the_same_bits(runs):
    folder, texts = runs
    assert is_same(folder, "whole.pt", "resumed.pt")
    assert f"resumed at step 4 with the state in {folder / 'states'}" in texts["resumed"]
    assert "resumed" not in texts["whole"]


@pytest.mark.full
def test_files_are_one_per_rank_and_step_and_hold_no_code(runs):
    folder, _ = runs
    names = sorted(path.name for path in (folder / "states").iterdir())
    steps = {name.split("-")[1] for name in names}
    assert steps == {"step2", "step4", "step6", "step7"}, names
    assert len(names) == 8
    for name in names:
        assert "memory" in torch.load(folder / "states" / name, weights_only=True)


@pytest.mark.full
def test_without_its_state_it_differs_and_the_summary_says_so(runs):
    folder, texts = runs
    assert "without the state" not in texts["whole"]
    text = run(folder, steps=7, save_at=6, result="without.pt")
    assert not is_same(folder, "whole.pt", "without.pt")
    assert "saved checkpoints without the state of this recipe" in text
    (folder / "checkpoint.pt").unlink()
    text = run(folder, "--state", "states", "--state-every", "4", steps=7, save_at=6, result="other.pt")
    assert "states holds states of step(s) 2, 4, 6, 7, but for the weights of this model not one" in text
    assert f"saved a checkpoint after step 6, for which there is no state in {folder / 'states'}" in text
    assert "Use --state-every 2" in text
