"""`gradwire.testing`: ranks that always end, and a matrix that finds what is broken."""

import functools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.utils.data import DataLoader

import gradwire
from gradwire.ops import Family
from gradwire.ranks import rank_process, time_limit
from gradwire.testing import Case, RanksFailed, cases, check_hook, run_ranks, send_message
from gradwire.testing.expectations import Expectation, expectation_of
from tests.processes import is_alive, wait_until_gone


def job_sum(rank, start):
    total = torch.tensor([rank + start])
    dist.all_reduce(total)
    send_message(f"hello from {rank}")
    return total


def test_results_come_back_in_rank_order_and_messages_arrive():
    heard = set()
    results = run_ranks(job_sum, 3, args=(1,), on_message=lambda rank, text: heard.add((rank, text)))
    assert results == [torch.tensor([6])] * 3
    assert heard == {(rank, f"hello from {rank}") for rank in range(3)}


def job_variable(rank):
    return os.environ["A_VARIABLE"]


def test_variables_are_set_in_every_rank_and_only_there():
    assert run_ranks(job_variable, 2, environment={"A_VARIABLE": "set"}) == ["set", "set"]
    assert "A_VARIABLE" not in os.environ


def job_kernels(rank):
    return [family for family in get_args(Family) if f"gradwire.ops.cpu.{family}" in sys.modules]


def test_a_rank_starts_with_all_kernels_and_need_not_compile_them():
    assert run_ranks(job_kernels, 1) == [list(get_args(Family))]


def job_with_children(rank):
    forked = os.fork()
    if forked == 0:
        threading.Event().wait()  # with the rank's end of the pipe open
    started = subprocess.Popen(["sleep", "1000"])
    loader = DataLoader(torch.arange(4.0), batch_size=4, num_workers=1)
    return next(iter(loader)).sum().item(), [forked, started.pid]


def test_a_rank_may_have_children_and_they_end_with_it():
    results = run_ranks(job_with_children, 2)
    assert [total for total, _ in results] == [6, 6]
    wait_until_gone(pid for _, pids in results for pid in pids)


def job_raise(rank):
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def test_an_exception_on_one_rank_is_raised_with_every_ranks_traceback():
    with pytest.raises(RanksFailed, match="KeyError: 'the reason'") as caught:
        run_ranks(job_raise, 2)
    assert "in job_raise" in caught.value.errors[0]
    assert "in job_raise" in caught.value.errors[1]


def job_hang(rank):
    if rank == 1:
        send_message(subprocess.Popen(["sleep", "1000"]).pid)
        threading.Event().wait()
    return os.getpid()


def test_a_rank_that_hangs_is_ended_with_its_children_and_its_stack_is_shown(monkeypatch):
    children, ahead_s = [], 0.0

    def let_the_timeout_come(rank, pid):
        nonlocal ahead_s
        children.append(pid)
        while len(multiprocessing.active_children()) > 1:  # until rank 0 has ended
            time.sleep(0.01)
        ahead_s = 1000.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s, sleep=time.sleep)
    monkeypatch.setattr(rank_process, "time", clock)
    with pytest.raises(RanksFailed, match="still running at the timeout") as caught:
        run_ranks(job_hang, 2, timeout=120, on_message=let_the_timeout_come)
    assert len(children) == 1
    wait_until_gone(children)
    assert set(caught.value.errors) == {1}
    assert "in job_hang" in caught.value.errors[1]


def job_crash(rank):
    if rank == 0:
        os.abort()


def test_a_crash_is_told_by_its_signal():
    with pytest.raises(RanksFailed, match="SIGABRT"):
        run_ranks(job_crash, 2)


def job_crash_at_exit(rank):
    import atexit

    atexit.register(os._exit, 3)


def test_a_crash_while_exiting_is_not_overlooked():
    with pytest.raises(RanksFailed, match="exit code 3, while exiting"):
        run_ranks(job_crash_at_exit, 1)


class Adding:
    def __call__(self, rank, start):
        return rank + start

    def from_ten(self, rank):
        return rank + 10


def test_partials_objects_and_methods_are_run_as_functions_are():
    assert run_ranks(functools.partial(Adding(), start=5), 2) == [5, 6]
    assert run_ranks(Adding(), 1, args=(7,)) == [7]
    assert run_ranks(Adding().from_ten, 1) == [10]


class PicklesOneWay:
    def __reduce__(self):
        return int, ("no number",)


def job_send_one_way(rank):
    send_message("not by this" if rank else PicklesOneWay())
    return PicklesOneWay() if rank else None


def test_what_does_not_unpickle_is_an_error_of_the_rank_that_sent_it():
    with pytest.raises(RanksFailed, match="what it sent does not unpickle here") as caught:
        run_ranks(job_send_one_way, 2)
    assert set(caught.value.errors) == {0, 1}
    assert all("ValueError: invalid literal" in error for error in caught.value.errors.values())


def test_what_cannot_run_is_refused():
    for fn, arguments in ((lambda rank: None, ()), (job_sum, (lambda: 1,))):
        with pytest.raises(ValueError, match="must be from the top level of a module, .*<lambda>"):
            run_ranks(fn, 2, args=arguments)
    for timeout in (None, 0, float("nan")):
        with pytest.raises(ValueError, match=f"timeout must be a positive number of seconds, not {timeout}"):
            run_ranks(job_sum, 2, timeout=timeout)
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(job_sum, 0)
    with pytest.raises(TypeError, match=r"write run_ranks\(fn, world_size\)"):
        run_ranks(2, job_sum)
    with pytest.raises(RuntimeError, match="for ranks that run_ranks has started"):
        send_message("nobody listens")


PARENT = """
import sys
from gradwire.testing import run_ranks, send_message
from tests.test_testing import job_tell_and_hang

def told(rank, pid):
    print(pid, flush=True)

if __name__ == "__main__":
    run_ranks(job_tell_and_hang, 2, timeout=600, on_message=told)
"""


def job_tell_and_hang(rank):
    send_message(os.getpid())
    send_message(subprocess.Popen(["sleep", "1000"]).pid)
    threading.Event().wait()


def test_ranks_and_their_children_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    pids = [int(parent.stdout.readline()) for _ in range(4)]
    assert all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    wait_until_gone(pids)


# --- the matrix finds what is broken ---


def over_the_world(state, bucket):
    return torch_hooks.allreduce_hook(None, bucket)


def forgets_to_divide(state, bucket):
    return (
        dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future().then(lambda f: f.value()[0])
    )


def keyed_by_bucket_index(state, bucket):
    """Average, and keep a state of each bucket by its index, which breaks when DDP rebuilds them."""
    memory = state.setdefault(bucket.index(), torch.zeros_like(bucket.buffer()))
    memory.add_(bucket.buffer())
    return torch_hooks.allreduce_hook(None, bucket)


def differs_by_rank(state, bucket):
    future = torch_hooks.allreduce_hook(state, bucket)
    return future.then(lambda done: done.value() * (1 + 1e-7 * dist.get_rank()))


def seeds_the_generator(state, bucket):
    torch.manual_seed(0)
    return torch_hooks.allreduce_hook(state, bucket)


def swallows_infinity(state, bucket):
    bucket.buffer().nan_to_num_(0, 0, 0)
    return torch_hooks.allreduce_hook(state, bucket)


_limits = []


def hangs(state, bucket):
    """Return a future that nobody completes, and let the limit of the case come soon."""
    _limits.append(time_limit(1.0))
    _limits[-1].__enter__()
    return torch.futures.Future()


def returns_nothing(state, bucket):
    return None


def empty_state(group):
    return {}


BROKEN = {
    over_the_world: (Case(subgroup=True), "is off by"),
    forgets_to_divide: (Case(), "is off by"),
    keyed_by_bucket_index: (Case(), "RuntimeError"),
    differs_by_rank: (Case(), "ranks have different gradients"),
    seeds_the_generator: (Case(), "moved the global random generator"),
    swallows_infinity: (Case(nonfinite=True), "the infinite gradient has vanished"),
    hangs: (Case(), "in backward"),
    returns_nothing: (Case(), "via='attach' says what the hook returned"),
}


@pytest.mark.parametrize("hook", BROKEN, ids=lambda hook: hook.__name__)
def test_the_matrix_finds_a_broken_hook(hook):
    case, text = BROKEN[hook]
    factory = {"state_factory": empty_state} if hook is keyed_by_bucket_index else {}
    world_size = 4 if case.subgroup else 2
    # The case after the broken one still runs.
    sound = Case(dtype="float64", skew=False)
    report = check_hook(hook, **factory, world_size=world_size, cases=[case, sound])
    assert not report.ok
    assert len(report.results) == 2
    assert text in report.results[0].error, report
    assert f"BROKEN  {case}" in str(report)
    if hook is over_the_world:
        assert report.results[1].error is None, report


@pytest.mark.parametrize(
    ("spec", "expectation"),
    [
        ("noop", Expectation(1e-6, 0.01, False, "local")),
        ("fp32:reduction=sum", Expectation(1e-6, 0.01, False, "sum")),
        # Half a last place of each of two ranks and of their sum.
        ("bf16", Expectation(2**-8 * 3, 0.01)),
        ("int8", Expectation(3 / 254, 1.0)),
        ("int8:rounding=stochastic,local_size=2", Expectation(3 / 127, 1.0)),
        ("int4", Expectation(3 / 13, 1.0, True, residual_unit=2**-24)),
        ("int4:residual=bf16", Expectation(3 / 13, 1.0, True, residual_unit=2**-8)),
        ("route(ndim<2=fp32; *=int4)", Expectation(3 / 13, 1.0, True, residual_unit=2**-24)),
        ("schedule(0=bf16; 9=int8)", Expectation(3 / 254, 1.0)),
        # Steps are right with one of them, sums over steps with the other.
        ("route(ndim<2=int8; *=int4)", Expectation(None, 1.0, True)),
        ("sign:rotated=false", Expectation(5.0, 1.0)),
        ("sign:feedback=true,rotated=false", Expectation(None, 1.0, True, residual_unit=2**-24)),
        ("sign:feedback=true", Expectation(None, 1.0, True, residual_unit=2**-24, unbiased=True)),
        # Six deviations of each of two ranks, and of their sum, which is as much larger.
        ("sign", Expectation(2 * (1 + 6 * 0.756) * 6 * 0.756 + 6 * 0.756, 1.0, unbiased=True)),
        ("powersgd", Expectation(None, 1.0, True, residual_unit=2**-24)),
    ],
)
def test_a_recipe_says_itself_how_far_off_it_may_be(spec, expectation):
    found = expectation_of(gradwire.recipe(spec), world_size=2)
    # Errors of errors, and scales that are rounded up, come on top.
    tolerance = None if expectation.tolerance is None else pytest.approx(expectation.tolerance, rel=0.1)
    assert found == replace(expectation, tolerance=tolerance)


def test_a_hook_or_choice_that_cannot_be_checked_is_refused():
    with pytest.raises(ValueError, match="must be from the top level of a module, .*<lambda>"):
        check_hook(lambda state, bucket: None)
    with pytest.raises(ValueError, match="via must be one of ddp, attach, not 'nonsense'"):
        check_hook("fp32", via="nonsense")
    with pytest.raises(ValueError, match="expect must be one of mean, sum, local, not 'average'"):
        check_hook("fp32", expect="average")
    with pytest.raises(ValueError, match="device must be one of cpu, cuda, not 'gpu'"):
        check_hook("fp32", device="gpu")


def test_a_recipe_whose_errors_depend_on_the_gradients_needs_a_tolerance():
    with pytest.raises(ValueError, match="what powersgd:rank=2 leaves out depends on the gradients"):
        check_hook("powersgd:rank=2")


def test_cases_vary_one_axis_at_a_time_or_all():
    some, every = cases(), cases(full=True)
    assert len(set(some)) == len(some) >= 12
    assert set(some) <= set(every)
    assert str(Case()) == "base"
    assert str(Case(join=True, buckets="one")) == "buckets=one, join"
