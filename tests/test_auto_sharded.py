"""Recipe `auto` on shards without replicas: it chooses an encoding for each reduce-scatter."""

import io
import json
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp import AttachedModel, Attachments, attached_of
from gradwire.headroom import read_records
from gradwire.recipes import ENCODINGS
from gradwire.scripts import Observations, summarize
from gradwire.tuning import times
from gradwire.tuning.policy import NUM_SETTLING, NUM_TIMED
from gradwire.tuning.times import StepTimer, Times
from gradwire.tuning.tuner import Tuner
from tests.sharded_runs import (
    batch,
    exact_gradients,
    full_gradients,
    loss_of,
    make,
    same_bits,
    shard,
    train,
    world,
)

FIRST = NUM_SETTLING + NUM_TIMED - 1
SLOW, HIDDEN = Times(1.0, 0.9, 0.9), Times(1.0, 0.001, 0.5)


def pretend(steps=SLOW):
    """Let steps seem to take these times, and measuring cost nothing."""
    StepTimer.read = lambda timer: steps() if callable(steps) else steps
    Tuner.looking = 0.0


def require_same_everywhere(value):
    everyone = [None] * world()
    dist.all_gather_object(everyone, value)
    assert everyone.count(everyone[0]) == len(everyone), everyone


def unit_of(name):
    """Return the unit of a parameter of `shard`'s models: its block, or the rest."""
    return name.rpartition(".")[0].rpartition(".")[0] if name.startswith("blocks.") else ""


def encodings_by_unit(decision):
    found = {}
    for name, encoding in decision.encodings.items():
        found.setdefault(unit_of(name), set()).add(encoding)
    return found


def errors_of(model, plain, rank, step):
    """Return the relative error of a step's whole gradient, and that of its values."""
    want = exact_gradients(plain, step, world())
    model.zero_grad()
    loss_of(model, batch(rank, step)).backward()
    have = full_gradients(model)
    parts = [((have[name] - exact).norm() / exact.norm(), exact.numel()) for name, exact in want.items()]
    whole, exact = (torch.cat([each[name].flatten() for name in want]) for each in (have, want))
    mean = sum(float(error) ** 2 * numel for error, numel in parts) / exact.numel()
    return float((whole - exact).norm() / exact.norm()), math.sqrt(mean)


# --- choices ---


def check_choice(rank, spec, largest):
    pretend()
    model, plain = shard(make(width=64)), make(width=64)
    with gradwire.attach(model, spec) as wire:
        weights = train(model, range(FIRST), rank)
        plain.load_state_dict(weights)
        assert wire.decisions() == ()
        assert max(errors_of(model, plain, rank, FIRST)) < 0.01, "16 bits"
        (decision,) = wire.decisions()
        assert decision.step == FIRST
        require_same_everywhere(wire.decisions())
        assert decision.encodings.keys() == weights.keys()
        chosen = encodings_by_unit(decision)
        assert all(len(encodings) == 1 for encodings in chosen.values()), "one for each unit"
        (finest,) = chosen[""]
        assert ENCODINGS.index(finest) <= ENCODINGS.index("int4"), "it has tables"
        assert decision.error < largest
        for step in (50, 51):
            whole, values = errors_of(model, plain, rank, step)
            assert whole < 1.1 * decision.error
            assert 0.8 * decision.error < values < 1.15 * decision.error, "as a reduce-scatter has it"
        sent = sum(bucket.bytes_sent for bucket in wire.stats().steps[-1].buckets)
        claims = 24 * 3 * (world() - 1)
        assert wire.plan().bytes_sent + claims == sent <= decision.bytes_per_step + claims
        assert decision.reason in str(wire)
        attachments = Attachments(wire.recipe, [AttachedModel(wire, rank, world())])
        assert decision.reason in summarize(attachments, Observations()), "what `gradwire run` ends with"
    assert max(errors_of(model, plain, rank, 60)) < 1e-5, "by torch again"


@pytest.mark.parametrize(("spec", "largest"), [("auto", 0.3), ("auto:budget=0.1", 0.1)])
def test_two_ranks_choose_alike_and_keep_the_budget(spec, largest, two_ranks):
    two_ranks.run(check_choice, spec, largest)


def test_three_ranks_choose_alike_and_keep_the_budget(three_ranks):
    three_ranks.run(check_choice, "auto", 0.3)


def check_ceiling(rank, path):
    pretend(HIDDEN)
    model = shard(make())
    telemetry = gradwire.Telemetry(jsonl=path, errors=False)
    with gradwire.attach(model, "auto:bytes=1800", telemetry=telemetry) as wire:
        train(model, range(FIRST + 3), rank)
        (decision,) = wire.decisions()
        assert decision.reason == "smallest error with these bytes"
        assert 1200 < decision.bytes_per_step <= 1800
        claims = 24 * 3 * (world() - 1)
        assert sum(b.bytes_sent for b in wire.stats().steps[-1].buckets) <= 1800 + claims
    if rank == 0:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        (event,) = [each for each in events if each["event"] == "decision"]
        assert (event["step"], event["encodings"]) == (FIRST, dict(decision.encodings))


def test_a_ceiling_of_bytes_is_kept_and_decisions_are_events(two_ranks, tmp_path):
    two_ranks.run(check_ceiling, tmp_path / "wire.jsonl")


def check_trials(rank):
    def steps():
        chosen = set(attached_of(wire).tuned.tuner.encodings.values()) or {"bf16"}
        return Times({"fp32": 2.0, "bf16": 1.0}.get(min(chosen, key=ENCODINGS.index), 1.5), 0.9, 0.9)

    pretend(steps)
    model = shard(make())
    with gradwire.attach(model, "auto") as wire:
        train(model, range(80), rank)
        require_same_everywhere(wire.decisions())
        first, *_, last = wire.decisions()
        assert first.reason.endswith("of a step is communication")
        assert last.reason == "faster before"
        assert set(last.encodings.values()) == {"bf16"}
        assert {set(each.encodings.values()) == {"fp32"} for each in wire.decisions()} == {True, False}


def test_what_is_slower_is_given_up(two_ranks):
    two_ranks.run(check_trials)


def check_spoiled(rank):
    pretend()
    model = shard(make())
    spoilt = []

    def spoil(module, inputs, result):
        return result * math.inf if rank == 0 and spoilt else result

    model.head.register_forward_hook(spoil)
    with gradwire.attach(model, "auto") as wire:
        train(model, range(FIRST - 1), rank)
        spoilt.append(True)
        for step in range(3):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            assert not torch.isfinite(model.head.weight.grad.to_local()).all()
        assert wire.decisions() == ()
        spoilt.clear()
        train(model, [0], rank)
        (decision,) = wire.decisions()
        assert decision.step == FIRST + 2
        assert 0 < decision.error < 0.3


def test_steps_that_are_not_finite_are_ignored(two_ranks):
    two_ranks.run(check_spoiled)


# --- what torch does around ---


class Sometimes(nn.Module):
    """Uses its last layer in some steps only; the embedding makes the whole a unit with a table."""

    def __init__(self):
        super().__init__()
        self.embed, self.always, self.rarely = nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, tokens, *, is_rare):
        x = self.always(self.embed(tokens))
        return self.rarely(x) if is_rare else x


def check_unused(rank):
    pretend()
    torch.manual_seed(0)
    model = Sometimes()
    model = fully_shard(fully_shard(model.always) and model)

    def run(steps, is_rare):
        for step in steps:
            model.zero_grad()
            tokens = torch.randint(8, (16,), generator=torch.Generator().manual_seed(10 * step + rank))
            model(tokens, is_rare=is_rare(step)).square().sum().backward()

    with gradwire.attach(model, "auto") as wire:
        run(range(FIRST + 2), lambda step: False)
        (decision,) = wire.decisions()
        assert decision.encodings.keys() == {"", "always.weight", "always.bias"}, "the rest, by its name"
        assert ENCODINGS.index(decision.encodings[""]) <= ENCODINGS.index("int4"), "it has a table"
        assert decision.encodings["always.weight"] == "int2"
        run(range(3), lambda step: True)
        assert wire.stats().num_steps == FIRST + 5
    with gradwire.attach(model, "auto") as wire:
        run(range(2 * FIRST), lambda step: step % 2 == 0)
        assert wire.decisions() == (), "no step is like the one before"
        run(range(2), lambda step: True)
        (decision,) = wire.decisions()
        assert decision.encodings.keys() == {name for name, _ in model.named_parameters()}
        require_same_everywhere(wire.decisions())


def test_parameters_without_a_gradient_may_be_left_out(two_ranks):
    two_ranks.run(check_unused)


def check_around(rank, options, num_micro, syncs_once):
    """Micro-batches are reduced each, or added up before one reduction."""
    pretend()
    model = shard(make(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.attach(model, "auto", weights="fp32" if num_micro == 1 else None) as wire:
        while wire.stats().num_steps < FIRST + 3:
            step = wire.stats().num_steps
            optimizer.zero_grad()
            for micro in range(num_micro):
                model.set_requires_gradient_sync(not syncs_once or micro == num_micro - 1)
                loss_of(model, batch(rank, step + 100 * micro)).backward()
            optimizer.step()
        (decision,) = wire.decisions()
        assert decision.step == FIRST
        assert set(decision.encodings.values()) & {"int3", "int2"}
        require_same_everywhere(wire.decisions())


MIXED = [
    MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(
    ("options", "num_micro", "syncs_once"),
    [
        ({}, 2, False),
        ({"reshard_after_forward": False}, 3, True),
        ({"mp_policy": MIXED[0], "reshard_after_forward": False}, 1, True),
        ({"mp_policy": MIXED[1]}, 1, True),
    ],
    ids=["micro-batches", "no_sync", "bf16", "bf16-reduced"],
)
def test_it_works_with_whatever_torch_does(options, num_micro, syncs_once, two_ranks):
    two_ranks.run(check_around, options, num_micro, syncs_once)


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


def check_waits_are_counted(rank):
    """Gradients that are accumulated are reduced while the pass waits."""
    waits = []
    model = shard(make())
    with gradwire.attach(model, "auto") as wire:
        timer = attached_of(wire).tuned.tuner.timer
        for _ in range(2):
            loss_of(model, batch(rank, 0)).backward()
            waits.append(len(timer._blocked))
    assert waits == [1, 3], "of three buckets two may travel; those to add to gradients may not"


def test_a_pass_that_waits_for_its_buckets_is_timed(two_ranks):
    two_ranks.run(check_waits_are_counted)


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


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_resumed(rank):
    pretend()
    model = shard(make())
    wire = gradwire.attach(model, "auto:every=40")
    weights = train(model, range(FIRST + 3), rank)
    state, decisions = through_a_file(wire.state_dict()), wire.decisions()
    want = train(model, range(FIRST + 3, 70), rank)
    wire.detach()
    plain = make()
    plain.load_state_dict(weights)
    again = shard(plain)
    with gradwire.attach(again, "auto:every=40") as resumed:
        resumed.load_state_dict(state)
        assert resumed.decisions() == decisions != ()
        assert same_bits(train(again, range(FIRST + 3, 70), rank), want)
        assert resumed.decisions() == wire.decisions()
        assert len(wire.decisions()) > len(decisions)


def test_a_resumed_run_is_the_one_that_was_not_stopped(two_ranks):
    two_ranks.run(check_resumed)


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
                ((exchange, _, _),) = attached_of(wire).engine.recipe.exchange.split(layout)
                assert exchange == dict(attached_of(wire).engine.recipe.tuning.encodings)[finest]
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


@pytest.mark.parametrize("words", [["run", "--ranks", "2"], pytest.param(MEASURE, marks=pytest.mark.full)])
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
