"""Users' hooks: their forms, their results, and their errors."""

import contextlib
import functools
import gc
import os
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.futures import Future

import gradwire
from gradwire.ddp import attaching, user_hooks
from gradwire.ddp.user_hooks import hook_name
from gradwire.ddp_comm_hooks import default_hooks
from gradwire.testing import run_ranks
from tests import annotated_hooks
from tests.models import backward, gradients, small_model
from tests.odd_errors import Final, NeedsMore, Record
from tests.torch_versions import needs_gloo_that_frees_the_gil

# --- every form of hook ---


class CallableObject:
    def __call__(self, state, bucket):
        return torch_hooks.allreduce_hook(state, bucket)


class Method:
    def average(self, state, bucket):
        return torch_hooks.allreduce_hook(state, bucket)


def with_factor(factor, state, bucket):
    assert factor == 1
    return torch_hooks.allreduce_hook(state, bucket)


def other_names(s, gradients):
    return torch_hooks.allreduce_hook(s, gradients)


def bare_future(state: object, bucket: dist.GradBucket) -> Future:
    return torch_hooks.allreduce_hook(state, bucket)


def of_fp32(group, bucket):
    total = bucket.buffer().float()
    dist.all_reduce(total, group=group)
    return completed(total / group.size())


def made_by_exec():
    """Return a function without a module, as generated code has."""
    names = {"average": torch_hooks.allreduce_hook}
    exec("def generated(state, bucket): return average(state, bucket)", names)
    return names["generated"]


FORMS = {
    "function": torch_hooks.allreduce_hook,
    "partial": functools.partial(with_factor, 1),
    "callable object": CallableObject(),
    "bound method": Method().average,
    "other parameter names": other_names,
    "a bare Future annotation": bare_future,
    "string annotations": annotated_hooks.with_string_annotations,
    "lambda": lambda state, bucket: torch_hooks.allreduce_hook(state, bucket),
    "a function of no module": made_by_exec(),
}


def check_form(rank, form):
    plain, model = small_model(), small_model()
    backward(plain)
    with gradwire.attach(model, FORMS[form], state=dist.group.WORLD):
        backward(model)
    assert torch.equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("form", FORMS)
def test_a_hook_of_any_form_can_be_attached(form, two_ranks):
    two_ranks.run(check_form, form)


def check_wrapped_hook_that_widens(rank):
    plain, model = small_model(), small_model()
    backward(plain)
    with gradwire.attach(model, default_hooks.fp16_compress_wrapper(of_fp32), state=dist.group.WORLD):
        backward(model)
    off = (gradients(model) - gradients(plain)).abs().max() / gradients(plain).abs().max()
    assert 0 < off < 1e-3


def test_a_wrapper_casts_whatever_its_hook_returns_as_torchs_does(two_ranks):
    two_ranks.run(check_wrapped_hook_that_widens)


def test_a_hook_is_named_by_its_module_if_it_has_one():
    assert hook_name(FORMS["partial"]) == "tests.test_user_hooks.with_factor"
    assert hook_name(FORMS["callable object"]) == "tests.test_user_hooks.CallableObject"
    assert hook_name(FORMS["a function of no module"]) == "generated"


# --- bad returns ---


def completed(value):
    future = Future()
    future.set_result(value)
    return future


def failing_callback(state, bucket):
    def fail(done):
        raise ZeroDivisionError("in the callback")

    return torch_hooks.allreduce_hook(state, bucket).then(fail)


def failed_future(state, bucket):
    future = Future()
    future.set_exception(KeyError("set on the future"))
    return future


def raising(state, bucket):
    raise KeyError("lost")


class UsersError(Exception):
    """An error that torch does not know."""


def raises(error):
    def hook(state, bucket):
        raise error

    return hook


def raises_in_callback(error):
    def fail(done):
        raise error

    return lambda state, bucket: (
        torch_hooks.allreduce_hook(state, bucket).then(fail).then(lambda done: done.value())
    )


# name: (hook, type of the error, a part of its text)
BAD = {
    "None": (
        lambda s, b: None,
        TypeError,
        "must return a torch.futures.Future object, but got builtins.NoneType",
    ),
    "a bare tensor": (lambda s, b: b.buffer(), TypeError, "Future object, but got torch.Tensor"),
    "a list": (lambda s, b: [b.buffer()], TypeError, "Future object, but got builtins.list"),
    "a future of None": (
        lambda s, b: completed(None),
        TypeError,
        "must hold one tensor, but holds builtins.NoneType",
    ),
    "a future of a list": (
        lambda s, b: completed([b.buffer()]),
        TypeError,
        "one tensor, but holds builtins.list",
    ),
    "a longer tensor": (lambda s, b: completed(torch.cat([b.buffer()] * 2)), ValueError, "a tensor of shape"),
    "a shorter tensor": (lambda s, b: completed(b.buffer()[:-1]), ValueError, "a tensor of shape"),
    "two dimensions": (lambda s, b: completed(b.buffer()[None]), ValueError, "a tensor of shape"),
    "another dtype": (
        lambda s, b: completed(b.buffer().half()),
        TypeError,
        "holds torch.float16, but the bucket is",
    ),
    "another device": (lambda s, b: completed(b.buffer().to("meta")), ValueError, "tensor on meta"),
    "an exception": (raising, KeyError, "KeyError: 'lost'"),
    "an exception in a callback": (failing_callback, ZeroDivisionError, "ZeroDivisionError: in the callback"),
    "a user's exception in a callback": (
        raises_in_callback(UsersError("boom")),
        UsersError,
        "UsersError: boom",
    ),
    "an exception in a callback that wants five arguments": (
        raises_in_callback(UnicodeDecodeError("utf8", b"x", 0, 1, "why")),
        RuntimeError,
        "UnicodeDecodeError: 'utf8' codec",
    ),
    "an exception that wants a record": (
        raises(NeedsMore(Record())),
        NeedsMore,
        "NeedsMore: bad record 7",
    ),
    "an exception that cannot be mixed": (raises(Final("alone")), gradwire.WireError, "Final: alone"),
    "an exception with the name of a file that is no text": (
        raises(ValueError(os.fsdecode(b"cannot read weights-\xff.bin"))),
        ValueError,
        "ValueError: cannot read weights-",
    ),
    "a wrapped hook's None": (
        default_hooks.bf16_compress_wrapper(lambda s, b: None),
        TypeError,
        "must return a torch.futures.Future object, but got builtins.NoneType",
    ),
    "a wrapped hook's one value for a whole bucket": (
        default_hooks.fp16_compress_wrapper(lambda s, b: completed(torch.full((1,), 7.0).half())),
        ValueError,
        "<lambda> holds a tensor of shape (1,), but the bucket's is (",
    ),
    "an exception on the future": (failed_future, KeyError, "set on the future"),
}


def check_bad(rank, name, bad_ranks):
    hook, kind, text = BAD[name]

    def sometimes_bad(state, bucket):
        if bucket.index() == 1 and rank in bad_ranks:
            return hook(state, bucket)
        return torch_hooks.allreduce_hook(state, bucket)

    group = dist.new_group()  # an allreduce that some ranks never join must not meet the next case's
    model = small_model(process_group=group)
    wire = gradwire.attach(model, sometimes_bad, state=group)
    backward(model)  # one bucket yet: nothing is wrong
    with pytest.raises(gradwire.WireError) as caught:
        backward(model)
        # A rank whose own gradients had arrived when another failed learns of it in its next step.
        assert rank not in bad_ranks
        backward(model)
    first = caught.value
    with pytest.raises(gradwire.WireError) as caught:  # a failed wire stays failed
        backward(model)
    assert str(caught.value) == str(first)
    assert text in str(first), name
    assert ", step 1, bucket 1, hook " in str(first)
    assert "sometimes_bad" in str(first)
    if rank in bad_ranks and not (len(bad_ranks) > 1 and isinstance(first, gradwire.PeerError)):
        assert isinstance(first, kind), name
        assert str(first).startswith(f"rank {rank}, ")
        assert not isinstance(first, gradwire.PeerError)
    elif rank in bad_ranks:  # it has heard of the other's failure before its own
        assert str(first).startswith(f"rank {1 - rank}, ")
    else:
        assert isinstance(first, gradwire.PeerError), first
        assert str(first).startswith(f"rank {bad_ranks[0]}, ")
    wire.detach()


@pytest.mark.parametrize("bad_ranks", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_return_is_one_clear_error_on_every_rank(name, bad_ranks, two_ranks):
    two_ranks.run(check_bad, name, bad_ranks)


def test_a_failure_reaches_ranks_that_are_not_neighbours():
    run_ranks(check_bad, 4, timeout=180, args=("an exception", (2,)))


# --- CUDA models over Gloo; only the device's name and its streams are stand-ins ---


def check_cuda_over_gloo(rank):
    with mock.patch.object(attaching, "device_of", return_value=torch.device("cuda")):
        check_bad(rank, "an exception", (1,))
        with pytest.raises(ValueError, match="verify_every= with a hook on cuda needs NCCL"):
            gradwire.attach(small_model(), torch_hooks.allreduce_hook, verify_every=1)


def test_a_hook_that_fails_on_cuda_over_gloo_raises_on_every_rank(two_ranks):
    two_ranks.run(check_cuda_over_gloo)


def test_a_result_that_waits_for_layouts_is_kept_on_the_stream_that_made_it(monkeypatch):
    used, kept = ["stream of the hook"], []

    @contextlib.contextmanager
    def use(stream):
        used.append(stream)
        yield
        used.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: used[-1])
    monkeypatch.setattr(torch.cuda, "stream", use)
    result = SimpleNamespace(is_cuda=True, device="cuda:0")
    keep = user_hooks._on_this_stream(lambda: kept.append(used[-1]), result)
    with use("stream of the ring"):
        keep()
    assert kept == ["stream of the hook"]


# --- join() calls hooks outside a backward pass ---


def job_join_failure(rank):
    model = small_model()
    calls = 0

    def fails_at_last(state, bucket):
        nonlocal calls
        calls += 1
        if rank == 0 and calls == 7:
            raise KeyError("in join")
        return torch_hooks.allreduce_hook(state, bucket)

    gradwire.attach(model, fails_at_last, state=dist.group.WORLD)
    num_batches = 2 if rank == 0 else 8
    with pytest.raises(gradwire.WireError, match="rank 0.*KeyError: 'in join'"), model.join():
        for seed in range(num_batches):
            backward(model, seed)


def test_a_failing_hook_in_join_raises_on_every_rank():
    run_ranks(job_join_failure, 2, timeout=180)


# --- lifetime ---


def job_lifetime(rank):
    class State:
        pass

    state, model = State(), small_model()

    def hook(state, bucket):
        return torch_hooks.allreduce_hook(None, bucket)

    alive = [weakref.ref(state), weakref.ref(hook), weakref.ref(model)]
    gradwire.attach(model, hook, state=state)
    del state, hook
    backward(model)
    gc.collect()
    assert alive[0]() is not None, "state and hook live as long as the registration"
    assert alive[1]() is not None
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]

    model = small_model()
    gradwire.attach(model, "bf16")
    backward(model)
    del model
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("gradwire"):
            thread.join(timeout=120)
            assert not thread.is_alive(), "a lane outlives its model"


def test_hook_state_and_lane_end_with_the_model():
    run_ranks(job_lifetime, 2, timeout=180)


def job_group_ends_with_the_model(rank):
    set_result, all_else_is_gone = Future.set_result, threading.Event()

    def linger(future, value):
        set_result(future, value)
        # This thread of the group is still in our callback while the rest goes, unless that waits for it.
        all_else_is_gone.wait(timeout=0.3)

    group = dist.new_group()
    model = small_model(process_group=group)
    wire = gradwire.attach(model, torch_hooks.allreduce_hook)
    backward(model)
    Future.set_result = linger
    backward(model)
    Future.set_result = set_result
    wire.detach()
    dist.destroy_process_group(group)
    del model, wire, group
    gc.collect()
    all_else_is_gone.set()
    dist.barrier()


@needs_gloo_that_frees_the_gil
def test_a_group_is_not_ended_by_a_thread_of_its_own():
    run_ranks(job_group_ends_with_the_model, 2, timeout=180)
