"""Errors on every rank when one of them is killed, stopped or raises."""

import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.peers import distance, failure_store, last_words
from gradwire.ranks import rank_process
from gradwire.testing import RanksFailed, run_ranks, send_message
from tests.models import backward, net

LONG_S = 600.0  # longer than `run_ranks` waits: no error comes by this timeout
SHORT_S = 12.0  # no rank of a busy machine stands still for half as long
FAULTY_STEP = 3  # DDP has rebuilt its buckets, and every step is exchanged as it arrives


def model_of(group=None, **options):
    return DistributedDataParallel(net(), bucket_cap_mb=0.001, process_group=group, **options)


def raised_by(act, kind=gradwire.WireError):
    """Return the text of the error that ``act`` raises."""
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


# --- ranks that die, and ranks that stand still ---


class Deadly:
    """An exchange that calls ``action`` in the middle, if there is one."""

    communicates = True
    kernels = gradwire.fp32().exchange.kernels
    action = None

    def __repr__(self):
        return "Deadly()"

    def shared_bytes(self, layout, step):
        return 0

    def rounds(self, flat, context):
        if self.action is not None and context.layout.index == 1:
            # A round that the others wait in: they have this rank's chunk, and send theirs in vain.
            messages = context.group.post([flat[:1].clone() for _ in range(context.group.size)])
            messages.send((context.group.rank + 1) % context.group.size, flat[:1])
            self.action()
        yield from gradwire.fp32().exchange.rounds(flat, context)


def end_me(how):
    """Kill or stop this process; what is stopped is killed in the end by `run_ranks`."""
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    threading.Event().wait()


# name: (how, the faulty rank, where, what is attached). Rank 0 of each case hosts its store.
KILLED = {
    "in compute": ("kill", 1, "compute", "fp32"),
    "in an exchange, with the store": ("kill", 0, "exchange", "deadly"),
    "in an exchange, far away": ("kill", 1, "exchange", "far"),
    "with a hook": ("kill", 1, "compute", "hook"),
}
KILLED_RARELY = {
    "in an exchange": ("kill", 1, "exchange", "deadly"),
    "in compute, with the store": ("kill", 0, "compute", "fp32"),
    "with a hook and the store": ("kill", 0, "compute", "hook"),
}
STALLED = {
    "stopped in an exchange": ("stop", 1, "exchange", "deadly"),
    "stopped, with the store": ("stop", 0, "compute", "fp32"),
    "raised in its own forward pass, and alive": ("raise", 1, "compute", "fp32"),
}
STALLED_RARELY = {
    "busy elsewhere": ("busy", 1, "compute", "fp32"),
    "stopped in compute": ("stop", 1, "compute", "fp32"),
    "stopped, with a hook": ("stop", 1, "compute", "hook"),
    "busy elsewhere, with a hook": ("busy", 1, "compute", "hook"),
}
FAULTS = {**KILLED, **KILLED_RARELY, **STALLED, **STALLED_RARELY}
SIZE = 3


def start_anew(case, rank, size, timeout_s):
    """Replace the group of `run_ranks` by one for this case alone. Rank 0 hosts its store."""
    parents = PrefixStore(case, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        parents.set("port", str(store.port))
    else:
        store = TCPStore("127.0.0.1", int(parents.get("port")), is_master=False)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return parents


def wait_for_all(store, name, size):
    """Wait until ``size`` ranks have called this with the same name."""
    if store.add(f"{name} count", 1) == size:
        store.set(f"{name} by all", "")
    store.wait([f"{name} by all"])


def job_fault(world_rank, names):
    case, rank = names[world_rank // SIZE], world_rank % SIZE
    how, faulty, where, what = FAULTS[case]
    if (how, faulty) == ("stop", 0):
        failure_store._PATIENCE_S = 2.0  # the store never answers
    parents = start_anew(case, rank, SIZE, LONG_S if how == "kill" else SHORT_S)
    trip_s = {"far": 0.02}.get(what, 0.0)
    distance._try_s = lambda store: trip_s
    deadly, model = Deadly(), model_of()
    recipe = gradwire.Recipe("deadly", deadly)
    attached = {"deadly": recipe, "far": recipe, "hook": torch_hooks.allreduce_hook}
    gradwire.attach(model, attached.get(what, what))
    for step in range(FAULTY_STEP):
        backward(model, step)
    # A machine that still starts the ranks of other cases is slow.
    wait_for_all(parents.underlying_store, "ready", len(names) * SIZE)
    if rank == faulty:
        parents.set("pid", str(os.getpid()))
        if how == "busy":
            parents.wait(["over"])  # as a rank does that is stuck in its data
        elif how == "raise":
            try:
                model(torch.randn(4, 11))
            except RuntimeError:
                parents.wait(["over"])  # as one that is in a debugger, or cleans up
        elif where == "exchange":
            deadly.action = lambda: end_me(how)
        else:
            end_me(how)
    elif how in ("busy", "raise"):
        wait_for_status(faulty)
    text = raised_by(lambda: backward(model, FAULTY_STEP))
    again = raised_by(lambda: backward(model, FAULTY_STEP + 1))
    assert again == text, "a failed wire stays failed"
    send_message(text)
    if rank != faulty:
        wait_for_all(parents, "raised", SIZE - 1)
        parents.set("over", "")
        if how == "stop":
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(parents.get("pid")), signal.SIGKILL)
    if how in ("busy", "raise"):
        wait_for_all(parents, "told", SIZE)  # rank 0 has the store, which the late one still asks


def wait_for_status(rank):
    """Wait until a rank that stands still has posted its status, as it does after half of the timeout."""
    (failure,) = last_words._failures
    while failure.store.status(rank) is None:
        time.sleep(0.05)


def texts_of(faults):
    """Return what the ranks that are left have raised, by case."""
    names, told = list(faults), {name: [] for name in faults}

    def note(rank, text):
        told[names[rank // SIZE]].append(text)

    errors = {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_process, "_GRACE_S", 120.0)  # those that are left have work to do
            run_ranks(job_fault, len(names) * SIZE, timeout=240, args=(names,), on_message=note)
    except RanksFailed as failed:
        errors = failed.errors
    dead = {i * SIZE + rank for i, (how, rank, *_) in enumerate(faults.values()) if how in ("kill", "stop")}
    assert set(errors) == dead, "\n".join(errors.values())
    assert all("ended with signal SIGKILL" in text for text in errors.values())
    return told


RARELY = pytest.mark.full


@pytest.mark.parametrize("faults", [KILLED, pytest.param(KILLED_RARELY, marks=RARELY)], ids=["", "rarely"])
def test_a_killed_rank_is_an_error_on_all_others_with_rank_step_and_bucket(faults):
    for name, texts in texts_of(faults).items():
        _, faulty, _, what = faults[name]
        assert len(texts) == SIZE - 1
        for text in texts:
            assert re.match(rf"rank \d, step {FAULTY_STEP}, bucket \d, hook ", text), text
            if what != "hook":  # where the hook's own group says what is wrong
                assert "no message from rank" in text
                host_gone = "The group's store does not answer" in text
                assert host_gone if faulty == 0 else f"Furthest behind is rank {faulty}" in text
            assert "Raise the timeout" not in text, "nobody has waited for long"


@pytest.mark.parametrize("faults", [STALLED, pytest.param(STALLED_RARELY, marks=RARELY)], ids=["", "rarely"])
def test_when_the_timeout_strikes_the_rank_furthest_behind_is_named(faults):
    for name, texts in texts_of(faults).items():
        how, faulty, _, _ = faults[name]
        lives = how in ("busy", "raise")
        assert len(texts) == SIZE - 1 + lives
        for text in texts:
            assert re.match(rf"rank \d, step {FAULTY_STEP}, bucket \d, hook ", text), text
            host_gone = "The group's store does not answer" in text
            assert host_gone if faulty == 0 else f"Furthest behind is rank {faulty}" in text, text
            assert host_gone or "Raise the timeout of init_process_group if it is only slow" in text
            if lives:
                last = (
                    f"Rank {faulty} has averaged step {FAULTY_STEP - 1}, bucket 1 and started no bucket since"
                )
                doing = "handles RuntimeError: .*mat1 and mat2 .*, at" if how == "raise" else "is at"
                assert re.search(
                    rf"{last}; its main thread {doing} \S+test_faults.py:\d+ in job_fault\.", text
                )


# --- ranks that raise ---


class Raising:
    """An exchange that averages as fp32 does, until a rank raises."""

    communicates = True
    kernels = gradwire.fp32().exchange.kernels

    def __repr__(self):
        return "Raising()"

    def shared_bytes(self, layout, step):
        return 0

    def rounds(self, flat, context):
        if context.group.rank == 1 and context.step == FAULTY_STEP and context.layout.index == 1:
            raise FloatingPointError("overflow")
        yield from gradwire.fp32().exchange.rounds(flat, context)


def raising_hook(where):
    num_calls = 0

    def fail(done):
        raise KeyError("lost")

    def hook(group, bucket):
        nonlocal num_calls
        num_calls += bucket.index() == 0
        fails = dist.get_rank() == 1 and num_calls == FAULTY_STEP + 1 and bucket.index() == 1
        if fails and where == "call":
            fail(None)
        future = torch_hooks.allreduce_hook(group, bucket)
        return future.then(fail) if fails else future

    return hook


# What is attached, made in the rank, and the type of the error.
RAISING = {
    "in an exchange": (lambda: gradwire.Recipe("raising", Raising()), FloatingPointError),
    "in a hook": (lambda: raising_hook("call"), KeyError),
    "in a hook's callback": (lambda: raising_hook("callback"), KeyError),
}


def check_raising(rank, where):
    make, kind = RAISING[where]
    group = dist.new_group()  # an allreduce that some ranks never join must not meet the next scenario's
    model = model_of(group)
    gradwire.attach(model, make(), state=group)

    def train():
        for step in range(FAULTY_STEP + 2):  # a rank whose own gradients had come learns of it a step later
            backward(model, step)

    with pytest.raises(gradwire.WireError) as caught:
        train()
    assert str(caught.value).startswith(f"rank 1, step {FAULTY_STEP}, bucket 1, hook ")
    assert kind.__name__ in str(caught.value)
    assert isinstance(caught.value, kind if rank == 1 else gradwire.PeerError)


@pytest.mark.parametrize("where", RAISING)
def test_an_error_on_one_rank_is_raised_on_all_with_its_place_and_text(where, three_ranks):
    three_ranks.run(check_raising, where)
