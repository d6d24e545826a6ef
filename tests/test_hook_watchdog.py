"""A hook's future that nobody completes is given up."""

import threading
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.ddp import DDPBucket
from gradwire.ddp.hook_watchdog import HookWatchdog
from gradwire.ddp.user_hooks import HookRunner
from gradwire.errors import PeerError, Place, WireError
from gradwire.testing import run_ranks

PLACE = Place(0, 3, 2, "open")


def check_a_failure_during_the_call(rank):
    watchdog = HookWatchdog(dist.group.WORLD, "during")

    def hook(state, bucket):
        watchdog.fail(WireError("the ring has broken"))
        return Future()

    gradient = torch.ones(3)
    runner = HookRunner(hook, None, watchdog)
    bucket = DDPBucket(gradient, None, is_last=True, grad_bucket=object())
    future = runner.start(bucket, PLACE)
    assert future.done(), "nobody else would end the waiting before the timeout"
    assert future.value() is gradient
    runner.close()


def check_the_wait_after_a_peer_has_left(rank):
    watchdog = HookWatchdog(dist.group.WORLD, "left")
    finished = threading.Event()
    finished.set()  # the future has no callbacks
    before = time.monotonic()
    watchdog.watch(Future(), PLACE, lambda: None, finished)
    after = time.monotonic()
    dist.barrier()
    if rank == 0:
        ring, deadline = watchdog._ring, time.monotonic() + 120
        while not ring._broken:
            assert time.monotonic() < deadline, "the ring has not noticed"
            time.sleep(0.01)
        progress = ring.look()
        assert progress.place == PLACE
        assert before <= progress.since <= after, "a shorter patience is no longer wait"
    watchdog.close()


def check_what_had_failed_before(rank):
    watchdog, error = HookWatchdog(dist.group.WORLD, "before"), WireError("out of paper")
    assert watchdog.explained(error, PLACE, waited_s=0.0).text == "out of paper", "nobody has failed yet"
    dist.barrier()
    if rank == 1:
        watchdog._ring.failure.store.post_failure("rank 1 is out of memory")
    dist.barrier()
    explained = watchdog.explained(error, PLACE, waited_s=0.0)
    assert explained.text == "out of paper. Before that another rank had failed: rank 1 is out of memory"
    closed = WireError("Connection closed by peer [::1]:80")
    found = watchdog.explained(closed, PLACE, waited_s=0.0)
    assert isinstance(found, PeerError), "the other rank has closed it"
    assert str(found) == "rank 1 is out of memory"
    dist.barrier()
    watchdog.close()


def check_what_a_rank_does_is_still_told(rank):
    """A rank that stands still says what it does; that stays when the others give it up."""
    watchdog = HookWatchdog(dist.group.WORLD, "told")
    store = watchdog._ring.failure.store
    told = replace(watchdog._ring.look().status, doing="it reads a file")
    if rank == 1:
        store.post_status(told)
    dist.barrier()
    if rank == 0:
        watchdog.fail(WireError("rank 1 has not come"))
    else:
        deadline = time.monotonic() + 120
        while watchdog.failure is None:
            assert time.monotonic() < deadline, "the ring has not noticed"
            time.sleep(0.01)
        assert store.status(1) == told
    dist.barrier()
    watchdog.close()


def job_watchdog(rank):
    check_what_a_rank_does_is_still_told(rank)
    check_what_had_failed_before(rank)
    check_a_failure_during_the_call(rank)
    check_the_wait_after_a_peer_has_left(rank)


def test_a_wait_ends_with_the_failure_and_tells_its_reason_and_beginning():
    run_ranks(job_watchdog, 2, timeout=180)
