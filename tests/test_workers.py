"""A lane's workers: which tasks run beside each other, in which order, and what both of them share."""

import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.errors import Place, WireError, describe
from gradwire.lanes import lane as execution
from gradwire.lanes.task import Promise, Task
from gradwire.lanes.workers import WorkerLane
from gradwire.peers.failure import Failure
from gradwire.peers.groups import SingleRankGroup
from gradwire.testing import run_ranks

LIMIT_S = 120


@pytest.fixture
def lane():
    lane = WorkerLane(
        [SingleRankGroup(), SingleRankGroup()], Failure(None, "test"), timedelta(seconds=LIMIT_S), "test"
    )
    yield lane
    lane.close()


def task_of(number, act, *, overlaps):
    def run(flats, group, scratch):
        act()
        return flats

    return Task(run, (Promise(torch.zeros(1)),), Place(0, 0, number, "test"), overlaps=overlaps)


def threads_of(places, **options):
    """Return the number of the worker that runs each task; ``places`` has their steps and buckets."""
    workers = [SingleRankGroup(), SingleRankGroup()]
    lane = WorkerLane(workers, Failure(None, "test"), timedelta(seconds=LIMIT_S), "test", **options)
    found = []

    def run(flats, group, scratch):
        found.append(workers.index(group))
        return flats

    for step, bucket in places:
        place = Place(0, step, bucket, "test")
        submit(lane, Task(run, (Promise(torch.zeros(1)),), place, overlaps=True)).wait()
    lane.close()
    return found


def submit(lane, task):
    lane.submit(task)
    return task.promises[0].future


def wait_for(event):
    assert event.wait(LIMIT_S), "this task should have been let go"


def test_workers_take_turns():
    assert threads_of([(0, 0), (1, 0), (1, 1), (2, 0)]) == [0, 1, 0, 1]


def test_where_buckets_share_messages_each_step_begins_with_the_first_worker():
    places = [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert threads_of(places, shares_messages=True, in_steps=True) == [0, 0, 1, 0, 0]
    assert threads_of(places, shares_messages=True) == [0, 1, 0, 1, 0], "calls may be under way together"


def test_a_task_that_holds_its_lane_lets_it_go_before_anybody_can_wait_for_its_end():
    lane = WorkerLane([SingleRankGroup()], Failure(None, "test"), timedelta(seconds=LIMIT_S), "test")
    threads = []
    weakref.finalize(lane, lambda: threads.append(threading.current_thread()))
    future = submit(lane, task_of(0, lambda held=lane: None, overlaps=True))
    future.wait()
    del lane
    assert threads == [threading.current_thread()], "a lane that ends in its own thread may abort at exit"


def test_a_lane_that_its_own_thread_drops_last_is_ended_by_one_that_is_waited_for():
    lane = WorkerLane([SingleRankGroup()], Failure(None, "test"), timedelta(seconds=LIMIT_S), "test")
    ended, seen = threading.Event(), []
    pool, held = lane._pool, [lane]
    close = pool.close

    def close_and_tell():
        seen.append(threading.current_thread())
        close()
        ended.set()

    pool.close = close_and_tell
    del lane
    pool.submit(task_of(0, held.clear, overlaps=True))
    wait_for(ended)
    assert not seen[0].daemon


def test_a_task_that_would_end_its_thread_is_a_failure_and_its_bucket_is_done():
    for leaving in (SystemExit(3), KeyboardInterrupt()):
        lane = WorkerLane([SingleRankGroup()], Failure(None, "test"), timedelta(seconds=LIMIT_S), "test")

        def leave(error=leaving):
            raise error

        bucket = task_of(0, leave, overlaps=True)
        done, later = submit(lane, bucket), submit(lane, task_of(1, lambda: None, overlaps=True))
        deadline = time.monotonic() + LIMIT_S
        while not later.done():
            assert time.monotonic() < deadline, "the thread has ended"
            time.sleep(0.001)
        assert done.value() is bucket.promises[0].flat
        expected = f"rank 0, step 0, bucket 0, hook test: {describe(leaving)}"
        assert (type(lane.failure), str(lane.failure)) == (WireError, expected)
        lane.close()


def test_two_buckets_are_in_flight_and_a_third_waits_for_the_first(lane):
    begun, may_end = [threading.Event() for _ in range(4)], [threading.Event() for _ in range(4)]

    def act(number):
        begun[number].set()
        wait_for(may_end[number])

    futures = [submit(lane, task_of(number, lambda n=number: act(n), overlaps=True)) for number in range(4)]
    wait_for(begun[0])
    wait_for(begun[1])
    assert lane._pool.look().place.bucket == 0
    may_end[1].set()
    wait_for(begun[3])  # of the second worker
    assert not begun[2].is_set(), "the first worker is still at the first bucket"
    progress = lane._pool.look()
    assert (progress.place.bucket, progress.is_done) == (0, False), "the earliest that is not done"
    may_end[0].set()
    wait_for(begun[2])
    for event in may_end:
        event.set()
    for future in futures:
        future.wait()
    progress = lane._pool.look()
    assert (progress.place.bucket, progress.is_done) == (3, True)


def test_a_task_that_does_not_overlap_has_the_lane_to_itself(lane):
    under_way, seen, lock, both = set(), {}, threading.Lock(), threading.Barrier(2)

    def act(number):
        with lock:
            under_way.add(number)
            seen[number] = set(under_way)
        if number in (1, 2):  # which may overlap
            both.wait(LIMIT_S)
        # As long as it usually takes others to begin, if they may.
        threading.Event().wait(0.002)
        with lock:
            under_way.remove(number)

    alone = {0, 3, 4, 9, 14}
    futures = [
        submit(lane, task_of(number, lambda n=number: act(n), overlaps=number not in alone))
        for number in range(16)
    ]
    for future in futures:
        future.wait()
    order = list(seen)
    for number in alone:
        assert seen[number] == {number}
        assert order.index(number) == number, "all before it are over, and none after it has begun"
    assert {1, 2} in (seen[1], seen[2])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_either_worker_ends_the_work_of_both(lane, failing):
    both, ran = threading.Barrier(2), []

    def act(number):
        both.wait(LIMIT_S)
        if number == failing:
            raise KeyError("lost")

    first = [submit(lane, task_of(number, lambda n=number: act(n), overlaps=True)) for number in range(2)]
    for future in first:
        future.wait()
    later = [submit(lane, task_of(2, lambda: ran.append(2), overlaps=overlaps)) for overlaps in (True, False)]
    for future in later:
        future.wait()
    assert not ran
    assert str(lane.failure).startswith(f"rank 0, step 0, bucket {failing}, hook test: KeyError: 'lost'")


def test_a_bucket_for_which_the_device_gives_no_stream_is_completed_all_the_same(lane, monkeypatch):
    def no_stream(device):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", no_stream)
    tasks = [task_of(number, lambda: None, overlaps=True) for number in range(3)]  # more than threads
    for task in tasks:
        task.promises[0].ready = object()  # as a bucket on a device has it
        lane.submit(task)
    for task in tasks:
        done = threading.Event()
        task.promises[0].future.add_done_callback(lambda _, done=done: done.set())
        wait_for(done)
    assert "hook test: RuntimeError: out of memory" in str(lane.failure)


def test_states_move_with_their_parameters_when_two_buckets_ask_at_once():
    def layout(index, names):
        slots = [Slot(name, 3 * i, torch.Size([3]), (1,)) for i, name in enumerate(names)]
        return BucketLayout(index, torch.float32, tuple(slots))

    names = [f"p{i}" for i in range(40)]
    cpu = torch.device("cpu")
    for _ in range(30):
        memory = Memory()
        memory.flat("residual", layout(0, names), torch.float32, cpu).copy_(torch.arange(120.0))
        rebuilt, both, made = [layout(0, names[1::2]), layout(1, names[::2])], threading.Barrier(2), []

        def ask(own, memory=memory, both=both, made=made):
            both.wait(LIMIT_S)
            memory.flat("residual", own, torch.float32, cpu).add_(1)
            memory.cached("thing", 0, lambda: made.append(own))

        threads = [threading.Thread(target=ask, args=(own,)) for own in rebuilt]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        held = memory.named()["residual"]
        assert torch.cat([held[name] for name in names]).equal(torch.arange(120.0) + 1)
        assert len(made) == 1


class Raising:
    """Averages as fp32 does, until rank 1 raises in one bucket of the third step."""

    communicates = True
    kernels = gradwire.fp32().exchange.kernels

    def __init__(self, bucket):
        self.bucket = bucket

    def __repr__(self):
        return f"Raising({self.bucket})"

    def shared_bytes(self, layout, step):
        return 0

    def rounds(self, flat, context):
        if (context.group.rank, context.step, context.layout.index) == (1, 3, self.bucket):
            raise FloatingPointError("overflow")
        yield from gradwire.fp32().exchange.rounds(flat, context)


def train(rank, recipe, num_in_flight, num_steps=6, **options):
    """The gradients of every step, and the wire's state and figures after the last."""
    execution.NUM_IN_FLIGHT = num_in_flight
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(40, 40), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.001)
    gradients = []
    with gradwire.attach(model, recipe, **options) as wire:
        for step in range(num_steps):
            model.zero_grad()
            torch.manual_seed(100 * rank + step)
            model(torch.randn(4, 40)).square().mean().backward()
            gradients += [parameter.grad.clone() for parameter in model.parameters()]
        return gradients, wire.state_dict(), wire.stats()


def job_in_flight(rank):
    for recipe in ("bf16", "int4:rounding=stochastic", "powersgd:rank=2", "route(ndim<2=fp32; *=sign)"):
        scaler = torch.amp.GradScaler("cpu")
        gradients, state, stats = train(rank, recipe, 1, grad_scaler=scaler)
        others, other_state, other_stats = train(rank, recipe, 2, grad_scaler=scaler)
        assert all(one.equal(other) for one, other in zip(gradients, others, strict=True)), recipe
        memory, other_memory = state.pop("memory")[f"rank{rank}"], other_state.pop("memory")[f"rank{rank}"]
        assert state == other_state
        assert memory.keys() == other_memory.keys()
        for key, tensors in memory.items():
            assert all(tensor.equal(other_memory[key][name]) for name, tensor in tensors.items()), key
        assert other_stats.bytes_sent == stats.bytes_sent
        assert other_stats.num_messages == stats.num_messages
        for step, other_step in zip(stats.steps, other_stats.steps, strict=True):
            sent = [(bucket.bucket, bucket.bytes_sent) for bucket in step.buckets]
            assert [(bucket.bucket, bucket.bytes_sent) for bucket in other_step.buckets] == sent
        assert len(stats.steps[-1].buckets) >= 5

    for bucket in (2, 3):  # one of each worker
        with pytest.raises(gradwire.WireError, match=f"^rank 1, step 3, bucket {bucket}, .*: overflow"):
            train(rank, gradwire.Recipe("raising", Raising(bucket)), 2)


def test_two_in_flight_change_no_bit_of_what_one_gives_and_a_failure_in_either_reaches_all():
    run_ranks(job_in_flight, 3, timeout=180)
