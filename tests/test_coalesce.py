"""Buckets whose messages travel together."""

import copy
import functools
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.averaging import Bucket, Coalescer, Engine, RunState, Timeline
from gradwire.averaging.coalesce import ENOUGH_BYTES
from gradwire.averaging.job import Job, Scaling, run_jobs
from gradwire.averaging.regroup import Regrouper
from gradwire.buckets import BucketLayout, Memory, Slot
from gradwire.codecs import Affine, Blocks, Cast, Raw, Rotated
from gradwire.ddp import DDPBucket, HookRunner, SteppingRunner, ddp_attachment_of
from gradwire.errors import Place
from gradwire.exchanges import Context, Scratch
from gradwire.exchanges.scatter import Seeds, Sum
from gradwire.exchanges.two_phase import TwoPhaseReduce
from gradwire.lanes import Promise
from gradwire.peers import SingleRankGroup, distance
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
        patch.setattr(distance, "_round_trip_s", lambda store: 0.2 * rank)
        model = DistributedDataParallel(
            nn.Sequential(*(nn.Linear(30, 30) for _ in range(4))), bucket_cap_mb=0.003
        )
        with gradwire.attach(model, "int8") as wire:
            for _ in range(3):
                model(torch.randn(8, 30)).sum().backward()
            *others, last = (bucket.num_messages for bucket in wire.stats().steps[-1].buckets)
        assert len(others) >= 2
        assert others == [0] * len(others)
        assert last == 2, "one in each phase"
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


def test_an_error_of_a_bucket_that_shares_messages_says_which_it_is():
    jobs = [job_at(0, 0), job_at(0, 1, "one of several"), job_at(0, 2)]
    with pytest.raises(ArithmeticError, match="^rank 0, step 0, bucket 1, hook powersgd: .*one of several"):
        run_jobs(jobs, Memory(), False, [job.flat for job in jobs], SingleRankGroup(), Scratch())


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


def test_a_step_that_cannot_be_regrouped_leaves_no_bucket_waiting():
    timeline, failures = Timeline(num_transient=1), []
    timeline.load(0, [(0, (("float32", ("another",)),))])
    regrouper = Regrouper(timeline)
    jobs = [job_at(0, index, is_last=index == 2) for index in range(3)]
    assert [regrouper.take(job, failures.append) for job in jobs[:2]] == [[], []]
    with pytest.raises(ValueError, match="they differ in"):
        regrouper.take(jobs[2], failures.append)
    regrouper.give_up()
    assert all(job.promise.future.done() for job in jobs)


def test_an_error_on_the_way_back_from_regrouped_buckets_leaves_none_waiting():
    timeline, failures = Timeline(num_transient=1), []
    timeline.load(0, [(0, (("float32", ("p1", "p0")),))])
    regrouper = Regrouper(timeline)
    jobs = [job_at(0, index, is_last=index == 1) for index in range(2)]
    assert regrouper.take(jobs[0], failures.append) == []
    (regrouped,) = regrouper.take(jobs[1], failures.append)
    regrouped.promise.keep(torch.ones(3))  # not what was asked for
    assert all(job.promise.future.value() is job.flat for job in jobs)
    assert len(failures) == 1


@pytest.mark.parametrize("names", [("p0", "p1", "p2"), ("p2", "p1", "p0")], ids=["as they arrive", "moved"])
def test_an_error_between_the_buckets_of_a_regrouped_step_leaves_none_waiting(names):
    class Failing(Asking):
        def shared_bytes(self, layout, step):
            if layout.index == 1:
                raise ArithmeticError("no second one")
            return 16

    state = RunState(timeline=Timeline(num_transient=1))
    state.timeline.load(0, [(0, tuple(("float32", (name,)) for name in names))])
    recipe = gradwire.Recipe("failing", Failing())
    engine = Engine(recipe, EagerLane(), state, coalescer=Coalescer(100))
    buckets = [Bucket(job.flat, job.layout, job.place.bucket == 2) for job in map(job_at, [0] * 3, range(3))]
    futures = [engine.start(bucket, Place(0, 0, bucket.layout.index, "failing")) for bucket in buckets[:2]]
    with pytest.raises(ArithmeticError, match="no second one"):
        engine.start(buckets[2], Place(0, 0, 2, "failing"))
    engine.give_up()
    assert all(future.done() for future in futures)


def test_a_hook_whose_futures_wait_for_later_buckets_is_given_up_when_none_will_come():
    runner = HookRunner(lambda state, bucket: torch.futures.Future(), None)
    future = runner.start(one_parameter(0, False), Place(0, 0, 0, "waiting"))
    assert not future.done()
    runner.give_up()
    assert future.done()


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


class EagerLane:
    """Runs tasks at once, alone, as a stream does."""

    shares_messages = runs_inline = True
    failure = None

    def submit(self, task):
        task.keep(task.run(task.flats, SingleRankGroup(), Scratch()))


class Asking:
    """An exchange of 16 bytes, or of any number, that asks for one sum, and may fail after it."""

    communicates = True

    def __init__(self, num_bytes=16, error=None):
        self.num_bytes, self.error = num_bytes, error

    def shared_bytes(self, layout, step):
        return self.num_bytes

    def rounds(self, flat, context):
        yield (Sum(flat),)
        if self.error is not None:
            raise ArithmeticError(self.error)


def job_at(step, index, error=None, *, num_bytes=16, device="cpu", is_last=False):
    layout = BucketLayout(index, torch.float32, (Slot(f"p{index}", 0, torch.Size([4]), (1,)),))
    promise, place = Promise(torch.ones(4, device=device)), Place(0, step, index, "powersgd")
    return Job(promise, layout, place, Asking(num_bytes, error), Scaling("sum"), is_last)


def test_what_waits_of_a_backward_pass_that_broke_off_is_not_sent_with_the_next():
    coalescer = Coalescer(100)
    jobs = [job_at(0, 0), job_at(0, 1), job_at(1, 0), job_at(1, 1, is_last=True)]
    assert [coalescer.take(job, may_wait=True) for job in jobs] == [[], [], [], [jobs[2:]]]


def test_buckets_do_not_wait_once_their_messages_are_large():
    coalescer = Coalescer(100)
    small, large, next_small = job_at(0, 0), job_at(0, 1, num_bytes=100), job_at(0, 2)
    assert coalescer.take(small, may_wait=True) == []
    assert coalescer.take(large, may_wait=True) == [[small, large]]
    assert coalescer.take(next_small, may_wait=True) == []


def test_buckets_that_share_nothing_do_not_wait_and_the_last_one_lets_the_others_go():
    coalescer = Coalescer(100)
    waiting, alone, measured = job_at(0, 0), job_at(0, 1, num_bytes=0), job_at(0, 2, is_last=True)
    assert coalescer.take(waiting, may_wait=True) == []
    assert coalescer.take(alone, may_wait=True) == [[alone]]
    assert coalescer.take(measured, may_wait=False) == [[waiting], [measured]]


def test_without_a_number_of_bytes_every_bucket_goes_by_itself():
    coalescer, job = Coalescer(), job_at(0, 0)
    assert coalescer.take(job, may_wait=True) == [[job]]


def test_buckets_of_different_devices_do_not_wait_for_one_another():
    coalescer = Coalescer(100)
    first, second = job_at(0, 0), job_at(0, 1, device="meta")
    assert coalescer.take(first, may_wait=True) == []
    assert coalescer.take(second, may_wait=True) == [[first]]


class Later:
    """A runner whose buckets are averaged when all have come."""

    name, failure, stats = "later", None, None

    def __init__(self):
        self.futures = []

    def start(self, bucket, place):
        self.futures.append(torch.futures.Future())
        if bucket.is_last:
            self.give_up()
        return self.futures[-1]

    def give_up(self):
        for future in self.futures:
            future.set_result(torch.ones(1))


def one_parameter(index, is_last):
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    layout = BucketLayout(index, torch.float32, (Slot("p", 0, torch.Size([1]), (1,)),))
    return DDPBucket(parameter.grad, layout, is_last, parameters=[parameter], grad_bucket=object())


def test_a_step_waits_for_buckets_that_wait_for_others_without_keeping_them():
    stepped = []
    runner = SteppingRunner(
        Later(), EagerLane(), lambda parameters, gradients, group: stepped.append(gradients[0].item())
    )
    first = runner.start(one_parameter(0, False), Place(0, 0, 0, "later"))
    assert not first.done()
    assert not stepped
    last = runner.start(one_parameter(1, True), Place(0, 0, 1, "later"))
    assert first.done()
    assert last.done()
    assert stepped == [1.0, 1.0]


@pytest.mark.parametrize("at_the_end", [False, True])
def test_steps_that_wait_for_later_buckets_are_not_kept_when_none_will_come(at_the_end):
    runner = SteppingRunner(Later(), EagerLane(), lambda *_: None, at_the_end=at_the_end)
    first = runner.start(one_parameter(0, False), Place(0, 0, 0, "later"))
    assert not first.done()
    runner.give_up()
    assert first.done()


def test_buckets_share_messages_also_when_the_lane_is_opened_by_a_swap():
    engine = Engine(gradwire.noop(), None, may_wait=True)
    engine.swap(gradwire.recipe("int8"), EagerLane)
    buckets = [Bucket(job.flat, job.layout, False) for job in map(job_at, [0] * 2, range(2))]
    first, _ = (engine.start(each, Place(0, 0, each.layout.index, "int8")) for each in buckets)
    assert not first.done(), "it waits for the last one"


def test_an_engine_that_nobody_holds_is_freed_at_once():
    gc.disable()
    try:
        engine = Engine(gradwire.noop(), None)
        freed = weakref.ref(engine)
        del engine
        assert freed() is None, "a cycle would keep its lane until the garbage collector runs"
    finally:
        gc.enable()
