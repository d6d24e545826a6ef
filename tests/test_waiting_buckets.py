"""Buckets that wait for later ones of their step, and are given up if none come."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gradwire
from gradwire.averaging import Bucket, Coalescer, Engine, RunState, Timeline
from gradwire.averaging.job import Job, Scaling, run_jobs
from gradwire.averaging.regroup import Regrouper
from gradwire.buckets import BucketLayout, Memory, Slot
from gradwire.ddp import DDPBucket, HookRunner, SteppingRunner
from gradwire.errors import Place
from gradwire.exchanges import Scratch
from gradwire.exchanges.scatter import Sum
from gradwire.lanes import Promise
from gradwire.peers import SingleRankGroup


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


def test_an_error_of_a_bucket_that_shares_messages_says_which_it_is():
    jobs = [job_at(0, 0), job_at(0, 1, "one of several"), job_at(0, 2)]
    with pytest.raises(ArithmeticError, match="^rank 0, step 0, bucket 1, hook powersgd: .*one of several"):
        run_jobs(jobs, Memory(), False, [job.flat for job in jobs], SingleRankGroup(), Scratch())


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
    engine = Engine(recipe, EagerLane(), state)
    engine.coalescer = Coalescer(100)
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
