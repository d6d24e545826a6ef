"""Recipe `auto` where gradients are not DDP's: in an `Averager`, and over replicas of a sharded model."""

import io

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.recipes import ENCODINGS
from gradwire.tuning.policy import NUM_SETTLING, NUM_TIMED
from gradwire.tuning.times import StepTimer, Times
from gradwire.tuning.trials import WINDOW
from gradwire.tuning.tuner import Tuner
from tests.auto_runs import require_same_everywhere
from tests.sharded_runs import batch as batch_of
from tests.sharded_runs import loss_of, make, mesh_of, same_bits, shard

FIRST = NUM_SETTLING + NUM_TIMED - 1
SCALES = {"large": 1.0, "medium": 0.03, "small": 1e-3}


def pretend_slow_links():
    """Let most of a step seem to be communication, and measuring cost nothing."""
    StepTimer.read = lambda timer: Times(1.0, 0.9, 0.9)
    Tuner.looking = 0.0


def draw(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: s * torch.randn(150, 150, generator=generator) for name, s in SCALES.items()}


def exact(step):
    ranks = [draw(rank, step) for rank in range(dist.get_world_size())]
    return {name: torch.stack([each[name] for each in ranks]).double().mean(0) for name in SCALES}


def error_of(tensors, step):
    flat, want = (torch.cat([t.flatten().double() for t in each.values()]) for each in (tensors, exact(step)))
    return float((flat - want).norm() / want.norm())


def average(averager, rank, steps):
    tensors = {}
    for step in steps:
        averager.average_(tensors := draw(rank, step))
    return tensors


# --- an averager ---


def check_averager_chooses(rank):
    pretend_slow_links()
    with gradwire.Averager("auto:budget=0.25") as averager:
        tensors = average(averager, rank, range(FIRST + 1))
        assert averager.decisions() == (), "it decides when the next call begins"
        assert error_of(tensors, FIRST) < 0.01
        tensors = average(averager, rank, range(FIRST + 1, FIRST + 3))
        (decision,) = averager.decisions()
        assert decision.step == FIRST
        assert ENCODINGS.index(decision.encodings["large"]) < ENCODINGS.index(decision.encodings["small"])
        assert 0.01 < error_of(tensors, FIRST + 2) < 1.1 * decision.error
        assert 0.02 < decision.error < 0.25
        assert averager._engine.recipe.exchange.apart == ("medium", "small"), "they share no block"
        require_same_everywhere([averager.decisions(), {name: t.tolist() for name, t in tensors.items()}])
        sent = sum(bucket.bytes_sent for bucket in averager.stats().steps[-1].buckets)
        assert averager.plan().bytes_sent <= sent <= averager.plan().bytes_sent + 100
        assert decision.reason in str(averager)
        assert "of the time" in str(averager)
        with pytest.raises(ValueError, match=r"auto.* does not work with reduce_scatter"):
            averager.reduce_scatter(torch.ones(4))
        averager.swap("int8")
        assert averager.decisions() == ()
        averager.swap("auto")
        average(averager, rank, range(FIRST + 1))


def test_an_averager_chooses_by_tensor_and_says_so(two_ranks):
    two_ranks.run(check_averager_chooses)


WEIGHTS = (1000.0, 1.0, 0.0)


def check_weights(rank):
    pretend_slow_links()
    with gradwire.Averager("auto:budget=0.25") as averager:
        for step in range(FIRST + 3):
            own = draw(rank, step)["large"]
            if not WEIGHTS[rank]:
                own.fill_(float("nan"))  # its values do not count
            averager.average_(own, weight=WEIGHTS[rank])
        (decision,) = averager.decisions()
        require_same_everywhere([averager.decisions(), own.tolist()])
        want = sum(w * draw(r, FIRST + 2)["large"] for r, w in enumerate(WEIGHTS)) / sum(WEIGHTS)
        # Nearly all of the mean is one rank's, so errors of ranks do not cancel out.
        assert float((own - want).norm() / want.norm()) == pytest.approx(decision.error, rel=0.05)


def test_an_averager_measures_errors_of_weighted_means(three_ranks):
    three_ranks.run(check_weights)


def check_averager_resumes(rank):
    pretend_slow_links()
    with gradwire.Averager("auto:feedback=true") as averager:
        average(averager, rank, range(FIRST + 3))
        file = io.BytesIO()
        torch.save(averager.state_dict(), file)
        want = average(averager, rank, range(FIRST + 3, FIRST + 3 * WINDOW))
        decisions = averager.decisions()
    file.seek(0)
    with gradwire.Averager("auto:feedback=true") as averager:
        averager.load_state_dict(state := torch.load(file, weights_only=True))
        assert averager._engine.recipe.exchange.apart == ("medium", "small")
        assert len(averager.decisions()) == 1
        have = average(averager, rank, range(FIRST + 3, FIRST + 3 * WINDOW))
        assert all(torch.equal(have[name], want[name]) for name in want), "bit for bit"
        assert averager.decisions() == decisions
        with pytest.raises(ValueError, match="its tuning cannot be read"):
            averager.load_state_dict({**state, "tuning": "{}"})


def test_an_averager_resumes_with_its_decisions(two_ranks):
    two_ranks.run(check_averager_resumes)


def check_handles(rank):
    pretend_slow_links()
    with gradwire.Averager("auto") as averager:
        for step in range(2 * FIRST):
            handles = [averager.start(draw(rank, step)) for _ in range(2)]
            # Ranks may wait in any order; only calls have one.
            for handle in handles if rank else reversed(handles):
                handle.wait()
        require_same_everywhere(averager.decisions())
        assert averager.decisions() != ()
        for step in range(2 * FIRST):  # lists in turns: none of them is a step like the one before
            averager.average_(draw(rank, step))
            averager.average_({"other": torch.ones(7)})
        require_same_everywhere(averager.decisions())


def test_averagings_that_overlap_or_alternate_do_not_confuse_ranks(two_ranks):
    two_ranks.run(check_handles)


# --- sharded models ---


def check_replicas(rank):
    pretend_slow_links()
    mesh = mesh_of(2, 2)
    model = shard(make(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.attach(model, "auto:budget=0.3") as wire:
        for step in range(FIRST + 3):
            optimizer.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            optimizer.step()
        (decision,) = wire.decisions()
        require_same_everywhere(wire.decisions())
        assert decision.step == FIRST
        assert set(decision.encodings) == {name for name, _ in model.named_parameters()}
        assert set(decision.encodings.values()) & {"int4", "int2"}
        assert 0.02 < decision.error < 0.3
        assert decision.encodings["embed.weight"] != "int2", "a table"
        everyone = [None] * 4
        dist.all_gather_object(everyone, {name: p.grad.to_local() for name, p in model.named_parameters()})
        assert same_bits(everyone[0], everyone[2])
        assert same_bits(everyone[1], everyone[3])
        state = wire.state_dict()
    with gradwire.attach(model, "auto:budget=0.3") as again:
        again.load_state_dict(state)
        assert again.decisions() == (decision,)


def test_shards_and_replicas_choose_alike(four_ranks):
    four_ranks.run(check_replicas)
