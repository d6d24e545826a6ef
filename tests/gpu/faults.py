"""Ranks that raise, stand still or are killed, on NCCL: the promises of docs/reliability.md.

On NCCL an exchange waits on the device, and torch may end the process that waits. So these ranks are
processes of their own, and their output is read. `CHECKS` is run by tests/gpu/run.py.
"""

import concurrent.futures
import contextlib
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

import gradwire
from gradwire.testing import run_ranks
from tests.gpu.models import FAULTY_STEP, backward, gradients_of, group_of, model_of, raised_by

TIMEOUT_S = 10.0  # of the process group
START_S = 60.0  # to import torch, make contexts and take the first steps
END_S = 20.0  # for torch to end a process after the timeout


class Raising:
    """An exchange that averages as fp32 does, until one rank raises: before or after it averages."""

    communicates = True
    kernels = gradwire.fp32().exchange.kernels

    def __init__(self, when):
        self.when = when

    def __repr__(self):
        return f"Raising({self.when!r})"

    def shared_bytes(self, layout, step):
        return 0

    def rounds(self, flat, context):
        fails = context.group.rank == 1 and context.step == FAULTY_STEP
        if fails and self.when == "before":
            raise FloatingPointError("overflow")
        yield from gradwire.fp32().exchange.rounds(flat, context)
        is_last = any(slot.name == "0.weight" for slot in context.layout.slots)
        if fails and self.when == "after" and is_last:
            raise FloatingPointError("overflow")


def raising_hook(group, where):
    """Return torch's hook, except that one rank raises once all have averaged the last bucket."""
    num_steps = 0

    def fail(done=None):
        raise KeyError("lost")

    def hook(state, bucket):
        nonlocal num_steps
        num_steps += bucket.index() == 0
        fails = dist.get_rank() == 1 and num_steps == FAULTY_STEP + 1 and bucket.is_last()
        future = torch_hooks.allreduce_hook(group, bucket)
        if fails and where == "call":
            fail()
        return future.then(fail) if fails else future

    return hook


def job_raise(rank, device="cuda"):
    """Raise on one rank, in an exchange or a hook; after detach the model goes on."""
    group = group_of(rank, device)
    cases = {
        "exchange": (gradwire.Recipe("raising", Raising("after")), FloatingPointError),
        "hook": (raising_hook(group, "call"), KeyError),
        "callback": (raising_hook(group, "callback"), KeyError),
    }
    for name, (what, kind) in cases.items():
        model, plain = model_of(group, device), model_of(group, device)
        wire = gradwire.attach(model, what)
        for step in range(FAULTY_STEP):
            backward(model, step)
        if rank == 1:
            text = raised_by(lambda model=model: backward(model, FAULTY_STEP), kind)
            assert re.match(rf"rank 1, step {FAULTY_STEP}, bucket 1, hook .*{kind.__name__}: ", text), text
            assert isinstance(wire.failure, gradwire.WireError), name
            again = raised_by(lambda model=model: backward(model, FAULTY_STEP + 1))
            assert again == text, "a failed wire stays failed"
        else:
            # Its own average is complete. On NCCL nothing tells it before it waits; on Gloo it may know.
            with contextlib.suppress(gradwire.PeerError):
                backward(model, FAULTY_STEP)
        wire.detach()
        dist.barrier()
        for recipe in ("int4", "fp32"):
            with gradwire.attach(model, recipe) as wire:
                for step in range(3):
                    backward(model, step)
                    backward(plain, step)
                assert wire.failure is None
        ours, expected = gradients_of(model), gradients_of(plain)
        for key, value in expected.items():
            assert (ours[key] - value).abs().max() <= 1e-5 * value.abs().max(), (name, key)


# --- processes that end ---


def fall(case):
    """End, stop or hang, as rank 1 does instead of its next step."""
    if case in ("killed", "stopped"):
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[case])
    threading.Event().wait()  # stuck in code of its own, until `check_fault` ends it


def live(case, rank, port, device):
    """Run one rank of a case: three good steps, and one that rank 1 does not take."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.basicConfig(format="%(name)s: %(message)s")
    torch.set_num_threads(1)
    store = PrefixStore(case, TCPStore("127.0.0.1", port, is_master=False))
    limit = timedelta(seconds=START_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    group = group_of(rank, device, TIMEOUT_S)
    if device == "cuda":
        torch.zeros(1, device=device)  # the context, before anybody waits for this rank
    dist.barrier()
    model = model_of(group, device)
    gradwire.attach(model, gradwire.Recipe("raising", Raising("before")) if case == "raised" else "int8")
    for step in range(FAULTY_STEP):
        backward(model, step)
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    print("ready", flush=True)
    if rank == 1 and case != "raised":
        fall(case)
    if rank == 1:
        print(raised_by(lambda: backward(model, FAULTY_STEP), FloatingPointError), flush=True)
        fall(case)
    backward(model, FAULTY_STEP)
    if device == "cuda":
        torch.cuda.synchronize()
    print("averaged", flush=True)


def start(case, rank, port, device, folder):
    env = {
        **os.environ,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # torch's default: the process ends at the timeout
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # without writing traces first
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    program = f"from tests.gpu import faults; faults.live({case!r}, {rank}, {port}, {device!r})"
    with (
        Path(folder, f"out{rank}").open("w") as out,
        Path(folder, f"err{rank}").open("w") as err,
    ):
        root = Path(__file__).parents[2]
        return subprocess.Popen([sys.executable, "-c", program], cwd=root, env=env, stdout=out, stderr=err)


def wait_until(holds, limit_s, otherwise):
    give_up = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > give_up:
            raise AssertionError(otherwise())
        time.sleep(0.05)


def last_words(case, device):
    """Return what the remaining rank writes before torch ends it, and what the other one printed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:

        def read(name):
            return Path(folder, name).read_text(errors="replace")

        def everything():
            return "\n".join(f"{name}: {read(name)}" for name in ("out0", "err0", "out1", "err1"))

        ranks = []
        try:
            ranks += [start(case, rank, store.port, device, folder) for rank in range(2)]
            wait_until(lambda: "ready" in read("out0"), START_S, everything)
            # Whether torch manages to end a process whose device waits is not ours to say; what it says is.
            wait_until(
                lambda: _told(read("err0")) or ranks[0].poll() is not None, TIMEOUT_S + END_S, everything
            )
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        assert "averaged" not in read("out0"), everything()
        return read("err0"), read("out1")


def _told(text):
    """Return the lines that say where a rank stands."""
    place = rf"rank \d, step {FAULTY_STEP}, bucket \d, hook \S+: "
    return [line for line in text.splitlines() if re.search(place, line)]


def check_fault(case, device="cuda"):
    told, said = last_words(case, device)
    # On Gloo, an error that began elsewhere is told in the words of where it began.
    teller = 1 if case == "raised" and device == "cpu" else 0
    place = rf"rank {teller}, step {FAULTY_STEP}, bucket \d, hook \S+: "
    lines = [line for line in told.splitlines() if re.search(place, line)]
    assert lines, told
    if case == "raised":
        text = f"rank 1, step {FAULTY_STEP}, bucket 0, hook raising: FloatingPointError: overflow"
        assert text in said, said
        assert text in lines[0], told
    if case in ("stopped", "busy"):
        assert "Furthest behind is rank 1" in lines[0], lines[0]
    if case == "busy":
        averaged = f"Rank 1 has averaged step {FAULTY_STEP - 1}, bucket 1 and started no bucket since"
        assert averaged in lines[0], lines[0]
    if device == "cuda":
        assert lines[0].startswith("gradwire: "), lines[0]
    return lines[0]


def check_faults(cases, device="cuda"):
    """Check several cases at once: each takes as long as the timeout."""
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: check_fault(case, device), cases))


CHECKS = {
    "trust a rank that raises": lambda: run_ranks(job_raise, 2, timeout=60),
    "trust ranks that stand still": lambda: check_faults(["raised", "stopped", "busy"]),
    "trust a rank that is killed": lambda: check_fault("killed"),
}
