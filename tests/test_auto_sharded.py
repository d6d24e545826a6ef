"""Recipe `auto` on shards without replicas: it chooses an encoding for each reduce-scatter."""

import json
import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire.buckets import BucketLayout, Slot
from gradwire.ddp import AttachedModel, Attachments, attachment_of
from gradwire.exchanges import Context, Scratch, average
from gradwire.recipes import ENCODINGS, scattered
from gradwire.scripts import Observations, summarize
from gradwire.testing import run_virtual_ranks
from gradwire.tuning import Chooser
from gradwire.tuning.errors import measure_errors
from gradwire.tuning.sampling import Sample
from gradwire.tuning.times import Times
from tests.auto_runs import FIRST, HIDDEN, encodings_by_unit, pretend, require_same_everywhere
from tests.sharded_runs import (
    batch,
    exact_gradients,
    full_gradients,
    loss_of,
    make,
    shard,
    train,
    world,
)


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


# --- errors ---


def shards_of(sizes, num_shards):
    """Return the layout of a bucket with this many values of each parameter in each shard."""
    slots = [Slot(f"p{i}", 0, torch.Size([num_shards * n]), (1,)) for i, n in enumerate(sizes)]
    return BucketLayout.packed(0, torch.float32, slots, num_shards)


def scattered_error(exchange, layout, gradients):
    """Return the squared error of all ranks' chunks together."""
    size = len(gradients)

    def job(group):
        flat = gradients[group.rank].clone()
        average(flat, exchange, Context(group, Scratch(), 1 / size, layout, step=7))
        return flat.view(size, -1)[group.rank]

    result = torch.stack(run_virtual_ranks(job, size)).view(-1).double()
    exact = torch.stack([each.double() for each in gradients]).mean(0)
    return float((result - exact).square().sum()), float(exact.square().sum())


@pytest.mark.parametrize("alike", [0.0, 3.0])
@pytest.mark.parametrize(("factor", "tolerance"), [(1, 0.03), (60, 0.1)], ids=["all", "sampled"])
def test_sampled_errors_are_those_of_the_reduce_scatter(factor, tolerance, alike):
    tuning = scattered(gradwire.recipe("auto")).tuning
    sizes = [factor * n for n in (3001, 7, 2500, 7, 1000)]
    scales = torch.cat([torch.full((n,), s) for n, s in zip(sizes, (1.0, 30.0, 0.2, 5.0, 3.0), strict=True)])
    layout = shards_of(sizes, 3)
    torch.manual_seed(1)
    # A part that all ranks share: then errors of ranks are alike too, and do not cancel out.
    common = alike * torch.randn(layout.numel)
    gradients = [scales.repeat(3) * (common + torch.randn(layout.numel)) for _ in range(3)]
    chooser = Chooser([layout], tuning, 3)

    def job(group):
        sample = Sample(chooser.units, step=7)
        sample.take(0, gradients[group.rank])
        return measure_errors(sample.values, sample, chooser.codecs, group, 7)

    tables = run_virtual_ranks(job, 3)
    assert tables[0] == tables[1] == tables[2], "the same on every rank"
    for number, (name, exchange) in enumerate(tuning.encodings):
        error, norm = scattered_error(exchange, layout, gradients)
        assert tables[0].norms[0] == pytest.approx(norm, rel=tolerance)
        assert tables[0].errors[0][number] == pytest.approx(error, rel=tolerance, abs=1e-9 * norm), name


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
        chosen = set(attachment_of(wire).tuned.tuner.encodings.values()) or {"bf16"}
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
        train(model, [0, 1], rank)
        (decision,) = wire.decisions()
        assert decision.step == FIRST + 3, "it looks after a step, then after two"
        assert 0 < decision.error < 0.3


def test_steps_that_are_not_finite_are_ignored(two_ranks):
    two_ranks.run(check_spoiled)


def fail(*_):
    raise RuntimeError("no memory for a sample")


def check_failure(rank):
    pretend()
    model = shard(make())
    with gradwire.attach(model, "auto") as wire:
        if rank == 1:
            attachment_of(wire).tuned.tuner.work = fail
        with pytest.raises(gradwire.WireError if rank == 0 else RuntimeError, match="no memory for a sample"):
            train(model, range(FIRST + 1), rank)
        assert wire.stats().num_steps == FIRST + 1
        assert wire.decisions() == ()


def test_an_error_of_one_rank_in_a_look_is_raised_on_all(two_ranks):
    two_ranks.run(check_failure)


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


class Either(nn.Module):
    """A layer, and one of two others, which differ in size."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.parts = nn.ModuleList([nn.Linear(8, 300), nn.Linear(8, 4)])

    def forward(self, x, part):
        return self.parts[part](self.always(x))


def check_other_parameters_unused(rank, first):
    """The unit keeps its name when torch leaves out others of its parameters, and has another size."""
    pretend()
    torch.manual_seed(0)
    model = fully_shard(Either())
    with gradwire.attach(model, "auto:bytes=2000") as wire:
        for step in range(FIRST + 2):
            part = first if step < 4 else 1 - first
            model.zero_grad()
            values = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            model(values, part).square().mean().backward()
            (layout,) = wire.layout()
            used = [*model.always.parameters(), *model.parts[part].parameters()]
            assert layout.numel == sum(-(-each.shape[0] // 2) * 2 * each[0].numel() for each in used)
        (decision,) = wire.decisions()
        assert decision.bytes_per_step == wire.plan().bytes_sent
        require_same_everywhere(wire.decisions())


@pytest.mark.parametrize("first", [0, 1], ids=["fewer values later", "more values later"])
def test_which_parameters_are_left_out_may_change(first, two_ranks):
    two_ranks.run(check_other_parameters_unused, first)


def check_ranks_leave_out_others(rank, spec):
    torch.manual_seed(0)
    model = fully_shard(Either())
    wire = gradwire.attach(model, spec)
    for part in (0, 1):
        model(torch.ones(4, 8), part).square().mean().backward()
    with pytest.raises(gradwire.WireError, match="ranks do not agree"):
        model(torch.ones(4, 8), rank).square().mean().backward()
    wire.detach()


@pytest.mark.parametrize("spec", ["auto", "int8"])
def test_ranks_that_leave_out_other_parameters_are_told(spec, two_ranks):
    two_ranks.run(check_ranks_leave_out_others, spec)


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
