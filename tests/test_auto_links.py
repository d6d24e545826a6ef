"""Recipe `auto` on links whose rate changes during the run, on DDP and on FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp import attachment_of
from gradwire.lab import Lab
from gradwire.ranks import run_ranks, send_message
from gradwire.tuning.policy import CHECK_SOON
from gradwire.tuning.policy_state import CHECK_EVERY
from gradwire.tuning.times import Times
from gradwire.tuning.trials import WINDOW
from tests.auto_runs import FIRST, pretend, require_same_everywhere
from tests.lab_machine import needs_lab


def make(kind, width):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
    if kind == "DDP":
        return DistributedDataParallel(model, bucket_cap_mb=0.5)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(model, steps, width):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        values = torch.randn(16, width)
        (model(values) - values.roll(1, dims=1)).square().mean().backward()
        optimizer.step()


def check_pretended(rank, kind):
    """Steps seem to take a tenth of a second, and the time of the present choice's bytes."""
    link_s = {"bf16": 1e-4}

    def steps():
        exposed = link_s["bf16"] * wire.plan().bytes_sent / bytes_at_first
        return Times(0.1 + exposed, exposed, exposed)

    pretend(steps)
    model = make(kind, 64)
    with gradwire.attach(model, "auto") as wire:
        train(model, range(3), 64)
        bytes_at_first = wire.plan().bytes_sent
        train(model, range(3, 70), 64)
        before = wire.decisions()
        assert before[-1].reason == "faster before", "exact gradients were tried"
        assert wire.plan().bytes_sent == bytes_at_first, "coarser ones promise nothing"
        link_s["bf16"] = 1.0
        noticed_at = 70 + CHECK_EVERY + CHECK_SOON + 1
        train(model, range(70, noticed_at), 64)
        noticed = wire.decisions()[len(before)]
        assert noticed.reason.endswith("of a step is communication")
        assert noticed.bytes_per_step < 0.3 * bytes_at_first
        train(model, range(noticed_at, noticed_at + 4 * WINDOW), 64)
        assert wire.plan().bytes_sent < 0.3 * bytes_at_first
        require_same_everywhere(wire.decisions())


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_change_of_the_rate_is_followed(kind, two_ranks):
    two_ranks.run(check_pretended, kind)


# --- in the lab, with real times ---


def check_in_the_lab(rank, kind):
    model = make(kind, 256)
    with gradwire.attach(model, "auto", weights="int8" if kind == "FSDP2" else None) as wire:
        train(model, range(FIRST), 256)
        at_first = wire.plan().bytes_sent
        train(model, range(FIRST, 60), 256)
        dist.barrier()
        if rank == 0:
            send_message("change")
        train(model, range(60, 140), 256)
        require_same_everywhere(wire.decisions())
        state = attachment_of(wire).tuned.tuner.policy.state
        kept = state.choice if state.trial is None else state.trial.kept.choice
        return at_first, kept.num_bytes, [each for each in wire.decisions() if each.step >= 60]


@pytest.mark.full
@needs_lab
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_link_that_becomes_slow_is_noticed(kind):
    with Lab(2, "1gbit") as lab:
        found = run_ranks(
            check_in_the_lab, 2, 400.0, args=(kind,), lab=lab, on_message=lambda *_: lab.set_rate("10mbit")
        )
    at_first, at_last, decisions = found[0]
    assert any(each.exposed_ms > 0.3 * each.step_ms for each in decisions), decisions
    assert at_last < 0.5 * at_first
