"""Recipe `auto` on shards, beside its choices: times, changes by the user, checkpoints, scripts."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp import attachment_of
from gradwire.headroom import read_records
from gradwire.recipes import ENCODINGS
from gradwire.tuning import times
from gradwire.tuning.policy import NUM_SETTLING, NUM_TIMED
from gradwire.tuning.times import StepTimer, Times
from tests.auto_runs import FIRST, encodings_by_unit, pretend, require_same_everywhere
from tests.resumed_runs import through_a_file
from tests.sharded_runs import (
    batch,
    loss_of,
    make,
    same_bits,
    shard,
    train,
    world,
)

# --- times ---


class SteppedClock:
    """A stand-in for the module ``time``, which a test sets."""

    now = 0.0

    def perf_counter(self):
        return self.now


def test_waiting_inside_a_backward_pass_is_exposed_too(monkeypatch):
    clock = SteppedClock()
    monkeypatch.setattr(times, "time", clock)
    timer, cpu = StepTimer(), torch.device("cpu")
    for _ in range(6):
        timer.begin_averaging(cpu)
        clock.now += 1  # computes
        with timer.blocked(cpu):
            clock.now += 5
        timer.end_arrivals(cpu)
        clock.now += 2
        timer.end(cpu)
    assert timer.read() == Times(8.0, 7.0, 8.0)


def test_time_in_which_several_buckets_are_under_way_is_exposed_once(monkeypatch):
    clock = SteppedClock()
    monkeypatch.setattr(times, "time", clock)
    timer, cpu = StepTimer(), torch.device("cpu")
    for _ in range(6):
        timer.begin_averaging(cpu)
        first, second, third = (torch.futures.Future() for _ in range(3))
        timer.count_until_done(first)
        clock.now += 1
        timer.count_until_done(second)
        clock.now += 1
        first.set_result(None)
        clock.now += 1
        second.set_result(None)
        clock.now += 4  # computes, and nothing travels
        timer.count_until_done(third)
        clock.now += 1
        timer.end_arrivals(cpu)
        clock.now += 2
        timer.end(cpu)
        timer.begin_averaging(cpu)
        third.set_result(None)  # so late that the next step has begun
    assert timer.read() == Times(10.0, 6.0, 10.0)


def check_reduce_scatters_are_timed(rank):
    """Gradients that are accumulated are reduced while the pass waits."""
    waits, counted = [], []
    model = shard(make())
    with gradwire.attach(model, "auto") as wire:
        timer = attachment_of(wire).tuned.tuner.timer
        timer.count_until_done = counted.append
        for _ in range(2):
            loss_of(model, batch(rank, 0)).backward()
            waits.append(len(timer._exposed_before))
    assert waits == [1, 3], "of three buckets two may travel; those to add to gradients may not"
    assert len(counted) == 6, "gathers wait for them, also while the pass does not"


def test_reduce_scatters_are_timed_and_so_is_waiting_for_them(two_ranks):
    two_ranks.run(check_reduce_scatters_are_timed)


# --- changes by the user, checkpoints ---


def check_swaps(rank):
    pretend()
    model = shard(make())
    with gradwire.attach(model, "int8") as wire:
        train(model, range(3), rank)
        wire.swap("auto")
        train(model, range(3, 4 + FIRST), rank)
        (decision,) = wire.decisions()
        assert decision.step == 3 + FIRST
        with pytest.raises(ValueError, match="keeps residuals"):
            wire.swap("auto:feedback=true")
        wire.swap("route(ndim<2=fp32; *=int4)")
        assert wire.decisions() == ()
        train(model, range(2), rank)
    with pytest.raises(ValueError, match="keeps residuals"):
        gradwire.attach(model, "auto:feedback=true")


def test_it_takes_over_from_other_recipes_and_they_from_it(two_ranks):
    two_ranks.run(check_swaps)


def check_resumed(rank, path):
    pretend()
    model = shard(make())
    wire = gradwire.attach(model, "auto:every=40")
    weights = train(model, range(FIRST + 3), rank)
    state, decisions = through_a_file(wire.state_dict()), wire.decisions()
    if path is not None:
        dcp.save({"wire": wire.state_dict()}, checkpoint_id=path)
    want = train(model, range(FIRST + 3, 70), rank)
    wire.detach()
    plain = make()
    plain.load_state_dict(weights)
    again = shard(plain)
    with gradwire.attach(again, "auto:every=40") as resumed:
        if path is not None:
            state = resumed.checkpoint_template(dcp.FileSystemReader(path).read_metadata())
            dcp.load(saved := {"wire": state}, checkpoint_id=path)
            state = saved["wire"]
        resumed.load_state_dict(state)
        assert resumed.decisions() == decisions != ()
        assert same_bits(train(again, range(FIRST + 3, 70), rank), want)
        assert resumed.decisions() == wire.decisions()
        assert len(wire.decisions()) > len(decisions)


@pytest.mark.parametrize(
    "is_shared",
    [pytest.param(False, marks=pytest.mark.full, id="own file"), pytest.param(True, id="one checkpoint")],
)
def test_a_resumed_run_is_the_one_that_was_not_stopped(is_shared, two_ranks, tmp_path):
    two_ranks.run(check_resumed, str(tmp_path / "checkpoint") if is_shared else None)


def save_states(rank, path):
    pretend()
    for name, model in (("shards", shard(make())), ("whole", DistributedDataParallel(make()))):
        wire = gradwire.attach(model, "auto:bytes=3000")  # times do not count, so there are no trials
        for step in range(FIRST + 2):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
        assert len(wire.decisions()) == 1
        state = wire.state_dict(gather=True)
        if rank == 0:
            torch.save(state, path / name)
        wire.detach()


def load_states(rank, path):
    """Encodings that differ within a unit become the finest of them, until the next look."""
    pretend()
    for name in ("shards", "whole"):
        state = torch.load(path / name, weights_only=True)
        model = shard(make())
        with gradwire.attach(model, "auto:bytes=3000") as wire:
            wire.load_state_dict(state)
            (before,) = wire.decisions()
            assert name == "shards" or len(encodings_by_unit(before)[""]) > 1
            soon = FIRST + 2 + NUM_SETTLING + NUM_TIMED
            is_same = name == "shards" and world() == 2
            assert (json.loads(wire.state_dict()["tuning"])["next_look"] == soon) != is_same
            train(model, range(2), rank)
            for layout in wire.layout():
                finest = min((before.encodings[slot.name] for slot in layout.slots), key=ENCODINGS.index)
                ((exchange, _, _),) = attachment_of(wire).engine.recipe.exchange.split(layout)
                assert exchange == dict(attachment_of(wire).engine.recipe.tuning.encodings)[finest]
            train(model, range(2, soon - FIRST), rank)
            looked = json.loads(wire.state_dict()["tuning"])["next_look"]
            assert is_same or looked > soon, "errors differ with the number of ranks and with the exchange"
            require_same_everywhere(wire.decisions())


def test_states_of_other_ranks_and_of_whole_models_are_taken(two_ranks, three_ranks, tmp_path):
    two_ranks.run(save_states, tmp_path)
    two_ranks.run(load_states, tmp_path)
    three_ranks.run(load_states, tmp_path)


# --- scripts ---


SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(2, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


MEASURE = ["headroom", "--steps", "12", "--quiet", "--json", "-"]


@pytest.mark.full
@pytest.mark.parametrize("words", [["run", "--ranks", "2"], MEASURE])
def test_it_works_in_scripts_as_they_are(words, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "gradwire", *words, "--recipe", "auto", "--", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if words[0] == "run":
        assert "20 steps" in ended.stderr
        assert "its decisions" in ended.stderr
    else:
        (found,) = read_records(ended.stdout)
        assert next(row.bytes_per_step for row in found.rows if row.recipe == "auto") > 0
