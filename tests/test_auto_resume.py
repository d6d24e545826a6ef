"""Runs of recipe `auto` that are stopped at any step around a look at errors decide as if they were not."""

import pytest
import torch

import gradwire
from gradwire.tuning.times import NUM_NEEDED, UNKNOWN, StepTimer
from tests.auto_runs import FIRST, SLOW, flat, make, pretend, train
from tests.resumed_runs import through_a_file
from tests.sharded_runs import make as make_whole
from tests.sharded_runs import same_bits, shard
from tests.sharded_runs import train as train_sharded

# Look at errors at steps 10, 30, 50 and so on, and change encodings whatever the times.
BY_BYTES = "auto:bytes={},every=20"
SECOND = FIRST + 20


class Looks:
    """The steps of a wire's looks at errors."""

    def __init__(self, wire):
        self.steps = []
        policy = gradwire.ddp.attachment_of(wire).tuned.tuner.policy
        look = policy._look
        policy._look = lambda step, *rest: self.steps.append(step) or look(step, *rest)


def check_ddp(rank, spec, steps, end):
    model, optimizer, wire = make(spec)
    saved, looks = {}, Looks(wire)
    train(model, optimizer, range(steps[0]))
    for step in steps:
        parts = [model.module.state_dict(), optimizer.state_dict(), wire.state_dict()]
        saved[step] = through_a_file(parts)
        train(model, optimizer, [step])
    train(model, optimizer, range(steps[-1] + 1, end))
    wire.detach()
    for step, (weights, momenta, state) in saved.items():
        again, optimizer, resumed = make(spec)
        again.module.load_state_dict(weights)
        optimizer.load_state_dict(momenta)
        resumed.load_state_dict(state)
        resumed_looks = Looks(resumed)
        train(again, optimizer, range(step, end))
        assert resumed_looks.steps == [each for each in looks.steps if each >= step], step
        assert resumed.decisions() == wire.decisions() != (), step
        assert torch.equal(flat(again), flat(model)), f"bit for bit, from step {step} on"
        resumed.detach()


AROUND_THE_FIRST = range(FIRST - 2, FIRST + 2)


def test_around_the_first_look(two_ranks):
    """The decision begins a trial."""
    two_ranks.run(check_ddp, "auto:budget=0.2", AROUND_THE_FIRST, FIRST + 8)


@pytest.mark.full
def test_around_a_later_look(two_ranks):
    two_ranks.run(check_ddp, BY_BYTES.format(40_000), range(SECOND - 2, SECOND + 2), SECOND + 22)


def check_sharded(rank, spec, steps, end):
    pretend()
    model = shard(make_whole())
    wire = gradwire.attach(model, spec)
    saved, looks = {}, Looks(wire)
    weights = train_sharded(model, range(steps[0]), rank)
    for step in steps:
        saved[step] = weights, through_a_file(wire.state_dict())
        weights = train_sharded(model, [step], rank)
    want = train_sharded(model, range(steps[-1] + 1, end), rank)
    wire.detach()
    for step, (weights, state) in saved.items():
        plain = make_whole()
        plain.load_state_dict(weights)
        again = shard(plain)
        with gradwire.attach(again, spec) as resumed:
            resumed.load_state_dict(state)
            resumed_looks = Looks(resumed)
            have = train_sharded(again, range(step, end), rank)
            assert resumed_looks.steps == [each for each in looks.steps if each >= step], step
            assert resumed.decisions() == wire.decisions() != (), step
            assert same_bits(have, want), f"bit for bit, from step {step} on"


@pytest.mark.parametrize(
    ("spec", "steps", "end"),
    [
        ("auto", AROUND_THE_FIRST, FIRST + 8),
        pytest.param(
            BY_BYTES.format(1800), range(SECOND - 2, SECOND + 2), SECOND + 22, marks=pytest.mark.full
        ),
    ],
    ids=["the first look", "a later one"],
)
def test_shards_around(spec, steps, end, two_ranks):
    two_ranks.run(check_sharded, spec, steps, end)


def draw(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: s * torch.randn(150, 150, generator=generator) for name, s in (("a", 1.0), ("b", 0.03))}


def average(averager, rank, steps):
    tensors = {}
    for step in steps:
        averager.average_(tensors := draw(rank, step))
    return tensors


def check_averager(rank, spec, steps, end):
    pretend()
    with gradwire.Averager(spec) as averager:
        saved = {}
        average(averager, rank, range(steps[0]))
        for step in steps:
            saved[step] = through_a_file(averager.state_dict())
            average(averager, rank, [step])
        want = average(averager, rank, range(steps[-1] + 1, end))
    for step, state in saved.items():
        with gradwire.Averager(spec) as resumed:
            resumed.load_state_dict(state)
            have = average(resumed, rank, range(step, end))
            assert resumed.decisions() == averager.decisions() != (), step
            assert same_bits(have, want), f"bit for bit, from step {step} on"


@pytest.mark.parametrize(
    ("spec", "steps", "end"),
    [
        ("auto:budget=0.2", AROUND_THE_FIRST, FIRST + 8),
        (BY_BYTES.format(30_000), range(SECOND - 2, SECOND + 2), SECOND + 22),
    ],
    ids=["the first look", "a later one"],
)
def test_an_averager_around(spec, steps, end, two_ranks):
    two_ranks.run(check_averager, spec, steps, end)


# --- times that are not known yet ---


def check_without_times(rank):
    """Only one encoding is allowed, so nothing is tried, and times change no decision."""
    spec = "auto:every=20,ceiling=bf16,floor=bf16"
    model, optimizer, wire = make(spec)
    StepTimer.read = lambda timer: SLOW if len(timer._steps) >= NUM_NEEDED else UNKNOWN
    train(model, optimizer, range(SECOND))
    state = through_a_file(wire.state_dict())
    wire.detach()
    with gradwire.attach(model, spec) as resumed:
        resumed.load_state_dict(state)
        looks = Looks(resumed)
        train(model, optimizer, range(SECOND, SECOND + 22))
        assert looks.steps == [SECOND, SECOND + 20]


def test_a_look_right_after_a_resume_goes_by_the_times_before(two_ranks):
    two_ranks.run(check_without_times)
