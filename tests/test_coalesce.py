"""Buckets whose messages travel together."""

import copy
import dataclasses
import functools
import math
import unittest.mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.averaging import coalesce as joint
from gradwire.averaging import runners
from gradwire.averaging.regroup import Regrouping, grouping_of
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.codecs import Affine, Blocks, Cast, Raw
from gradwire.ddp.stepping import SteppingRunner
from gradwire.ddp.user_hooks import HookRunner
from gradwire.errors import Place
from gradwire.exchanges import Context, Scratch, shared_bytes
from gradwire.exchanges.two_phase import Sum, TwoPhaseReduce
from gradwire.lanes.workers import WorkerLane
from gradwire.ops import Seed
from gradwire.peers.groups import Alone
from gradwire.testing import run_ranks, run_virtual_ranks

SPECS = [
    "powersgd:rank=2",
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


def train(rank, spec, num_steps, *, may_skip=True, telemetry=None):
    """Each step's gradients, what is held back at the end, and the figures of the last step's buckets."""
    torch.manual_seed(0)
    net = Branches()
    model = DistributedDataParallel(net, bucket_cap_mb=0.003, find_unused_parameters=may_skip)
    found = []
    with gradwire.attach(model, spec, telemetry=telemetry) as wire:
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
    WorkerLane.shares_messages, enough = True, joint._ENOUGH_BYTES
    try:
        shared, fewer = run()
        joint._ENOUGH_BYTES = 300
        some, _ = run(telemetry=gradwire.Telemetry(every=2))  # of which measured steps go alone
    finally:
        WorkerLane.shares_messages, joint._ENOUGH_BYTES = False, enough
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
    run_ranks(job_shared, world_size, timeout=120, args=(specs,))


def job_fails_in_the_middle(rank):
    """Rank 1 fails with its third bucket, when the first two wait for the last one."""
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.003)
    shared_bytes = runners.shared_bytes

    def failing(exchange, layout, step):
        if rank == 1 and layout.index == 2:
            raise ArithmeticError("no third one")
        return shared_bytes(exchange, layout, step)

    WorkerLane.shares_messages = True
    with (
        gradwire.attach(model, "int8"),
        unittest.mock.patch.object(runners, "shared_bytes", failing),
        pytest.raises(gradwire.WireError, match="rank 1, step 0, bucket 2, hook int8: .*no third one"),
    ):
        model(torch.randn(8, 24), True).square().sum().backward()


def test_a_failure_leaves_no_bucket_waiting_for_those_that_will_not_come():
    run_ranks(job_fails_in_the_middle, 2, timeout=60)


def test_an_error_of_a_bucket_that_shares_messages_says_which_it_is():
    lane, waiting, seen = EagerLane(), joint.Joint(), []

    def failing(flat, context):
        yield (Sum(flat),)
        raise ArithmeticError("one of several")

    broken = dataclasses.replace(bucket_at(0, 1, seen), rounds_of=failing)
    for bucket in (bucket_at(0, 0, seen), broken):
        waiting.add(lane, bucket, 16, lambda *_: None, is_last=False)
    with pytest.raises(ArithmeticError, match="^rank 0, step 0, bucket 1, hook powersgd: "):
        waiting.add(lane, bucket_at(0, 2, seen), 16, lambda *_: None, is_last=True)


def test_what_a_route_sends_by_itself_counts_as_what_waits():
    slots = Slot("l.weight", 0, torch.Size([64, 8]), (8, 1)), Slot("l.bias", 512, torch.Size([64]), (1,))
    layout = BucketLayout(0, torch.float32, slots)
    waits = {
        spec: shared_bytes(gradwire.recipe(spec).exchange, layout, 0)
        for spec in ("int8", "fp32", "route(*.bias=int8; *=fp32)", "route(*.bias=fp32; *=fp32)")
    }
    assert waits == {
        "int8": 576 + 2 * 3,
        "fp32": 0,
        "route(*.bias=int8; *=fp32)": 64 + 2 + 4 * 512,
        "route(*.bias=fp32; *=fp32)": 0,
    }


def test_an_error_between_regrouped_buckets_leaves_none_waiting():
    flat, futures, failures = torch.ones(4), [], []
    layouts = [
        BucketLayout(index, torch.float32, (Slot(f"p{index}", 0, torch.Size([4]), (1,)),))
        for index in range(3)
    ]

    def submit(flat, layout, place, is_last):
        if layout.index == 1:
            raise ArithmeticError("no second one")
        return runners.completed(flat)

    regrouping = Regrouping()
    for layout in layouts:
        place = Place(0, 0, layout.index, "int8")
        futures.append(
            regrouping.add(
                flat, layout, place, grouping_of(layouts), submit, failures.append, is_last=layout.index == 2
            )
        )
    assert all(future.done() for future in futures)
    assert len(failures) == 1


def test_a_hook_whose_futures_wait_for_later_buckets_is_given_up_when_none_will_come():
    runner = HookRunner(lambda state, bucket: torch.futures.Future(), None, None)
    future = runner.start(OneParameter(0, False), Place(0, 0, 0, "waiting"), shadow=False)
    assert not future.done()
    runner.abandon()
    assert future.done()


CODECS = [
    (Blocks("int4", 128), torch.float32),
    (Raw(torch.bfloat16), torch.bfloat16),
    (Cast(torch.float16), torch.float64),
    (Blocks("sign", 32), torch.float32),
    (Raw(torch.float64), torch.float64),
    (Affine(100), torch.float32),
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
        seeds = [Seed(number, chunk) for chunk in range(group.size)]
        sums.append(Sum(values, codec, residual, seeds))
    return sums


def results_of(numels, together, group):
    """What becomes of sums that share messages or do not, and the bytes and messages that it takes."""
    sums, context = sums_of(group, numels), Context(group, Scratch(), 1 / group.size, None)
    for some in [sums] if together else [[each] for each in sums]:
        TwoPhaseReduce(some, context).run()
    tensors = [each.values for each in sums]
    tensors += [each.residual for each in sums if each.residual is not None]
    return tensors, group.traffic.bytes_sent, group.traffic.num_messages


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("numels", [(1000, 1, 300, 65, 0, 64, 5000, 63), (0, 7, 0, 0, 3, 1, 2, 0)])
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
    """Of each parameter the sums of gradients and of results over steps, and what is held back at the end."""
    WorkerLane.shares_messages = True
    try:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
        local = copy.deepcopy(net)
        model = DistributedDataParallel(net, bucket_cap_mb=0.003)
        given, got = ([torch.zeros_like(p) for p in net.parameters()] for _ in range(2))
        with gradwire.attach(model, "powersgd:rank=2,factors=int4") as wire:
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
    finally:
        WorkerLane.shares_messages = False


def test_coarse_factors_that_share_messages_lose_nothing():
    first, second = run_ranks(job_law, 2)
    for number, got in enumerate(first[1]):
        assert torch.equal(got, second[1][number])
        given = first[0][number] + second[0][number]
        held = first[2][number] + second[2][number]
        assert held.norm() > 0.01 * given.norm()
        torch.testing.assert_close(2 * got + held, given, rtol=1e-4, atol=1e-4 * given.abs().max().item())


class EagerLane:
    """Runs tasks at once, alone, as a stream does."""

    shares_messages = runs_at_once = True
    failure = None

    def __init__(self):
        self.places = []

    def submit(self, task):
        self.places.append(task.place)
        future = torch.futures.Future()
        future.set_result(task.run(task.flat, Alone(), Scratch()))
        return future


def bucket_at(step, index, seen, device="cpu"):
    place = Place(0, step, index, "powersgd")
    context_of = functools.partial(Context, scale=1.0, layout=None)

    def rounds_of(flat, context):
        seen.append((step, index))
        yield (Sum(flat),)

    flat = torch.ones(4, device=device)
    return joint.Bucket(flat, place, lambda flat, *given: context_of(*given), rounds_of)


def test_what_waits_of_a_backward_pass_that_broke_off_is_not_sent_with_the_next():
    lane, waiting, seen = EagerLane(), joint.Joint(), []
    for step, index in ((0, 0), (0, 1), (1, 0), (1, 1)):
        future = waiting.add(
            lane, bucket_at(step, index, seen), 16, lambda *_: None, is_last=(step, index) == (1, 1)
        )
    assert seen == [(1, 0), (1, 1)]
    assert [place.step for place in lane.places] == [1]
    assert future.done()


def test_buckets_do_not_wait_once_their_messages_are_large():
    lane, waiting, seen = EagerLane(), joint.Joint(), []
    small, large = (
        waiting.add(lane, bucket_at(0, index, seen), num_bytes, lambda *_: None, is_last=False)
        for index, num_bytes in enumerate((16, joint._ENOUGH_BYTES))
    )
    assert small.done()
    assert large.done()
    assert not waiting.add(lane, bucket_at(0, 2, seen), 16, lambda *_: None, is_last=False).done()


def test_buckets_of_different_devices_do_not_wait_for_one_another():
    lane, waiting, seen = EagerLane(), joint.Joint(), []
    first, second = (
        waiting.add(lane, bucket_at(0, index, seen, device), 16, lambda *_: None, is_last=False)
        for index, device in enumerate(("cpu", "meta"))
    )
    assert first.done()
    assert not second.done()


class Later:
    """A runner whose buckets are averaged when all have come."""

    name, failure, stats = "later", None, None

    def __init__(self):
        self.futures = []

    def start(self, bucket, place, *, shadow):
        self.futures.append(torch.futures.Future())
        if bucket.is_last():
            self.abandon()
        return self.futures[-1]

    def abandon(self):
        for future in self.futures:
            future.set_result(torch.ones(1))


class OneParameter:
    """As much of a bucket as a runner looks at."""

    def __init__(self, index, is_last):
        self.index, self.is_last = lambda: index, lambda: is_last
        self.parameter = nn.Parameter(torch.zeros(1))
        self.parameter.grad = torch.zeros(1)

    def parameters(self):
        return [self.parameter]

    def gradients(self):
        return [self.parameter.grad]

    def buffer(self):
        return self.parameter.grad


def test_a_step_waits_for_buckets_that_wait_for_others_without_keeping_them():
    stepped = []
    runner = SteppingRunner(
        Later(), EagerLane(), lambda parameters, gradients, group: stepped.append(gradients[0].item())
    )
    first = runner.start(OneParameter(0, False), Place(0, 0, 0, "later"), shadow=False)
    assert not first.done()
    assert not stepped
    last = runner.start(OneParameter(1, True), Place(0, 0, 1, "later"), shadow=False)
    assert first.done()
    assert last.done()
    assert stepped == [1.0, 1.0]


@pytest.mark.parametrize("at_the_end", [False, True])
def test_steps_that_wait_for_later_buckets_are_not_kept_when_none_will_come(at_the_end):
    runner = SteppingRunner(Later(), EagerLane(), lambda *_: None, at_the_end=at_the_end)
    first = runner.start(OneParameter(0, False), Place(0, 0, 0, "later"), shadow=False)
    assert not first.done()
    runner.abandon()
    assert first.done()
