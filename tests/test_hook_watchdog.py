"""What becomes of a hook's future that nobody completes."""

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.ddp.hook_watchdog import HookWatchdog
from gradwire.ddp.user_hooks import HookRunner
from gradwire.errors import Place, WireError
from gradwire.testing import run_ranks

PLACE = Place(0, 3, 2, "open")


def check_a_failure_during_the_call(rank):
    guard = HookWatchdog(dist.group.WORLD, "during")

    def hook(state, bucket):
        guard.fail(WireError("the ring has broken"))
        return Future()

    gradient = torch.ones(3)
    runner = HookRunner(hook, None, guard)
    future = runner.start(SimpleNamespace(buffer=lambda: gradient), PLACE, shadow=False)
    assert future.done(), "nobody else would end the waiting before the timeout"
    assert future.value() is gradient
    runner.close()


def check_the_wait_after_a_peer_has_left(rank):
    guard = HookWatchdog(dist.group.WORLD, "left")
    before = time.monotonic()
    guard.watch(Future(), PLACE, lambda: None)
    after = time.monotonic()
    dist.barrier()
    if rank == 0:
        core, deadline = guard._core, time.monotonic() + 30
        while not core._broken:
            assert time.monotonic() < deadline, "the ring has not noticed"
            time.sleep(0.01)
        progress = core.look()
        assert progress.place == PLACE
        assert before <= progress.since <= after, "a shorter patience is no longer wait"
    guard.close()


def check_what_had_failed_before(rank):
    guard, error = HookWatchdog(dist.group.WORLD, "before"), WireError("connection closed")
    guard.add_reason(error, PLACE, waited_s=0.0)
    assert error.text == "connection closed", "nobody has failed yet"
    dist.barrier()
    if rank == 1:
        guard._core.failure.board.post_failure("rank 1 is out of memory")
    dist.barrier()
    guard.add_reason(error, PLACE, waited_s=0.0)
    assert error.text == "connection closed. Before that another rank had failed: rank 1 is out of memory"
    dist.barrier()
    guard.close()


def job_guard(rank):
    check_what_had_failed_before(rank)
    check_a_failure_during_the_call(rank)
    check_the_wait_after_a_peer_has_left(rank)


def test_a_wait_ends_with_the_failure_and_tells_its_reason_and_beginning():
    run_ranks(job_guard, 2, timeout=60)
