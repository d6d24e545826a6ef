"""Buckets whose messages travel together."""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.averaging import Coalescer
from gradwire.averaging.coalesce import ENOUGH_BYTES
from gradwire.buckets import BucketLayout, Slot
from gradwire.codecs import Affine, Blocks, Cast, Raw, Rotated
from gradwire.ddp import ddp_attachment_of
from gradwire.exchanges import Context, Scratch
from gradwire.exchanges.scatter import Seeds, Sum
from gradwire.exchanges.two_phase import TwoPhaseReduce
from gradwire.peers import distance
from gradwire.testing import run_ranks, run_virtual_ranks

SPECS = [
    "powersgd:rank=2",
    "powersgd:rank=2,factors=int8+int4",
    "acp:rank=2,factors=int4",
    "powersgd:rank=1,whole=true",
    "bf16",
    "sign:feedback=true,residual=bf16",
    "route(*.bias=int8; *=powersgd:rank=2,factors=int8)",
    "schedule(0=fp32; 2=acp:rank=2; 3=int8)",
    "sign:feedback=true",
    "fp16:reduction=sum",
    "route(*.bias=fp8; *.weight=int4; *=fp32)",
]


class Branches(nn.Module):
    """Some layers of several dtypes, of which the middle one may go unused."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.wide = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24).double()
        self.gain = nn.Parameter(torch.ones(24, dtype=torch.bfloat16))
        self.turn = nn.Parameter(torch.ones(24, dtype=torch.complex64))
        self.last = nn.Linear(24, 24)

    def forward(self, x, uses_middle):
        x = self.first(x)
        x = self.middle(x) if uses_middle else x
        x = torch.view_as_real(x * self.turn).sum(-1) * self.gain.float()
        return self.last(self.wide(x.double()).float())


def attach(model, spec, enough_bytes=0, **options):
    """Attach with buckets that wait until they have so many bytes to send, as they do on a stream."""
    wire = gradwire.attach(model, spec, **options)
    ddp_attachment_of(wire).engine.coalescer = Coalescer(enough_bytes)
    return wire


def train(rank, spec, num_steps, enough_bytes=0, *, may_skip=True, telemetry=None):
    """Each step's gradients, what is held back at the end, and the figures of the last step's buckets."""
    torch.manual_seed(0)
    net = Branches()
    model = DistributedDataParallel(net, bucket_cap_mb=0.003, find_unused_parameters=may_skip)
    found = []
    with attach(model, spec, enough_bytes, telemetry=telemetry) as wire:
        for step in range(num_steps):
            torch.manual_seed(100 * step + rank)
            model.zero_grad()
            model(torch.randn(8, 24), not may_skip or step % 3 != 2).square().sum().backward()
            found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        held = wire.state_dict()["memory"][f"rank{rank}"]
        found.append([held[kind][name] for kind in sorted(held) for name in sorted(held[kind])])
        return found, wire.stats().steps[-1].buckets


def job_shared(rank, specs):
    for spec in specs:
        compare(rank, spec, 4)
    compare(rank, "int4:rounding=stochastic", 50, may_skip=False)  # DDP rebuilds its buckets


def compare(rank, spec, num_steps, *, may_skip=True):
    """Buckets have the same results by themselves and together, with fewer messages."""
    run = functools.partial(train, rank, spec, num_steps, may_skip=may_skip)
    alone, figures = run()
    assert len(figures) >= 5
    shared, fewer = run(ENOUGH_BYTES)
    some, _ = run(300, telemetry=gradwire.Telemetry(every=2))  # of which measured steps go alone
    for other in (shared, some):
        for before, after in zip(alone, other, strict=True):
            for p, q in zip(before, after, strict=True):
                assert (p is None) == (q is None), spec
                assert p is None or torch.equal(p, q), spec
    assert len(fewer) == len(figures)
    num_messages = sum(bucket.num_messages for bucket in figures)
    assert sum(bucket.num_messages for bucket in fewer) < num_messages, spec
    if "powersgd" not in spec:
        gaps = sum(bucket.bytes_sent for bucket in fewer) - sum(bucket.bytes_sent for bucket in figures)
        assert 0 <= gaps < 64 * num_messages, spec


@pytest.mark.parametrize(("world_size", "specs"), [(2, SPECS[::2]), (3, SPECS[1::2])])
def test_buckets_that_share_messages_have_the_same_bits_and_send_fewer(world_size, specs):
    run_ranks(job_shared, world_size, timeout=240, args=(specs,))


def job_far(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distance, "_try_s", lambda store: 0.2 * rank)
        model = DistributedDataParallel(
            nn.Sequential(*(nn.Linear(30, 30) for _ in range(4))), bucket_cap_mb=0.003
        )
        with gradwire.attach(model, "int8") as wire:
            for _ in range(3):
                model(torch.randn(8, 30)).sum().backward()
            *others, last = (bucket.num_messages for bucket in wire.stats().steps[-1].buckets)
        assert len(others) >= 2
        assert others == [0] * len(others)
        assert last == 1, "two ranks need one round"
        assert wire.stats().wait_ms > 0


def test_if_one_rank_is_far_buckets_share_messages_on_all(two_ranks):
    two_ranks.run(job_far)


class NoThirdBucket:
    """Averages as int8 does, until rank 1 comes to its third bucket."""

    def __init__(self, rank):
        self.rank, self.inner = rank, gradwire.recipe("int8").exchange

    def __repr__(self):
        return "NoThirdBucket()"

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def shared_bytes(self, layout, step):
        if self.rank == 1 and layout.index == 2:
            raise ArithmeticError("no third one")
        return self.inner.shared_bytes(layout, step)


def job_fails_in_the_middle(rank):
    """Rank 1 fails with its third bucket, when the first two wait for the last one."""
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.003)
    with (
        attach(model, gradwire.Recipe("int8", NoThirdBucket(rank)), ENOUGH_BYTES),
        pytest.raises(gradwire.WireError, match="rank 1, step 0, bucket 2, hook int8: .*no third one"),
    ):
        model(torch.randn(8, 24), True).square().sum().backward()


def test_a_failure_leaves_no_bucket_waiting_for_those_that_will_not_come():
    run_ranks(job_fails_in_the_middle, 2, timeout=180)


def test_what_a_route_sends_by_itself_counts_as_what_waits():
    slots = Slot("l.weight", 0, torch.Size([64, 8]), (8, 1)), Slot("l.bias", 512, torch.Size([64]), (1,))
    layout = BucketLayout(0, torch.float32, slots)
    waits = {
        spec: gradwire.recipe(spec).exchange.shared_bytes(layout, 0)
        for spec in ("int8", "fp32", "route(*.bias=int8; *=fp32)", "route(*.bias=fp32; *=fp32)")
    }
    assert waits == {
        "int8": 576 + 2 * 3,
        "fp32": 0,
        "route(*.bias=int8; *=fp32)": 64 + 2 + 4 * 512,
        "route(*.bias=fp32; *=fp32)": 0,
    }


CODECS = [
    (Blocks("int4", 128), torch.float32),
    (Raw(torch.bfloat16), torch.bfloat16),
    (Cast(torch.float16), torch.float64),
    (Blocks("sign", 32), torch.float32),
    (Raw(torch.float64), torch.float64),
    (Affine(100), torch.float32),
    (Rotated(2, 128, worker_bits=1), torch.float32),
    (Blocks("fp8", 64, stochastic=True), torch.float32),
    (Cast(torch.bfloat16), torch.float32),
]


def sums_of(group, numels):
    """A sum for each size and codec, some with residuals, and of the second to last one value is NaN."""
    sums = []
    for number, (numel, (codec, dtype)) in enumerate(zip(numels, CODECS, strict=True)):
        generator = torch.Generator().manual_seed(100 * number + group.rank)
        values = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
        if number == len(CODECS) - 2 and numel:
            values[numel // 2] = math.nan
        residual = torch.full((numel,), 0.1).bfloat16() if codec.keeps_residual and number else None
        sums.append(Sum(values, codec, residual, Seeds(number, 0, 0)))
    return sums


def results_of(numels, together, group):
    """Return sums that share messages or do not, and the bytes and messages that they took."""
    sums, context = sums_of(group, numels), Context(group, Scratch(), 1 / group.size, None)
    for some in [sums] if together else [[each] for each in sums]:
        TwoPhaseReduce(some, context).run()
    tensors = [each.values for each in sums]
    tensors += [each.residual for each in sums if each.residual is not None]
    return tensors, group.traffic.bytes_sent, group.traffic.num_messages


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("numels", [(1000, 1, 300, 65, 0, 64, 3001, 5000, 63), (0, 7, 0, 0, 3, 1, 5, 2, 0)])
def test_sums_of_any_codecs_and_sizes_share_a_message_without_a_trace(numels, world_size):
    alone, together = (
        run_virtual_ranks(functools.partial(results_of, numels, flag), world_size) for flag in (False, True)
    )
    for (before, bytes_before, num_before), (after, bytes_after, num_after) in zip(
        alone, together, strict=True
    ):
        for p, q in zip(before, after, strict=True):
            assert torch.equal(p.view(torch.uint8), q.view(torch.uint8))
        assert bytes_before <= bytes_after < bytes_before + 64 * num_before
        assert num_after <= 2 * (world_size - 1)


def job_law(rank):
    """Return every parameter's gradients and results, summed over steps, and its residual at the end."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    local = copy.deepcopy(net)
    model = DistributedDataParallel(net, bucket_cap_mb=0.003)
    given, got = ([torch.zeros_like(p) for p in net.parameters()] for _ in range(2))
    with attach(model, "powersgd:rank=2,factors=int4", ENOUGH_BYTES) as wire:
        for step in range(5):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
            for module, total in ((local, given), (model, got)):
                module.zero_grad()
                module(x).square().sum().backward()
                for each, parameter in zip(total, module.parameters(), strict=True):
                    each.add_(parameter.grad)
        (held,) = [v for k, v in wire.state_dict()["memory"][f"rank{rank}"].items() if "residual" in k]
        assert len(wire.stats().steps[-1].buckets) >= 3
    return given, got, [held[name] for name, _ in net.named_parameters()]


def test_coarse_factors_that_share_messages_lose_nothing():
    first, second = run_ranks(job_law, 2)
    for number, got in enumerate(first[1]):
        assert torch.equal(got, second[1][number])
        given = first[0][number] + second[0][number]
        held = first[2][number] + second[2][number]
        assert held.norm() > 0.01 * given.norm()
        torch.testing.assert_close(2 * got + held, given, rtol=1e-4, atol=1e-4 * given.abs().max().item())
