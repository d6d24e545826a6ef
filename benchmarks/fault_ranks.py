"""The ranks of `faults.py`: they train a small model until one of them fails as its case says."""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import default_hooks, powerSGD_hook

NUM_STEPS = 8
PLANTED = "planted"
"""A file in the folder of a case, made when its fault happens."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}
ERRORS = {"ValueError": ValueError, "MemoryError": MemoryError, "KeyboardInterrupt": KeyboardInterrupt}
KINDS = (*SIGNALS, *ERRORS, "exit", "_exit")
PLACES = ("data", "forward", "hook", "exchange", "optimizer")
RECIPES = ("fp32", "bf16", "int8", "int4", "sign", "powersgd:rank=2", "route(ndim<2=fp32; *=int4)")
HOOKS = ("torch's hook", "our raw hook inside a hook", "a hook with callbacks")
RAW = ("raw allreduce", "raw powersgd")


@dataclass(frozen=True)
class Fault:
    """One case: a rank of a small run fails at a step, in a place, in a way."""

    number: int
    world_size: int
    averaging: str
    kind: str
    place: str
    rank: int
    step: int
    bucket: int
    rank_0_hosts: bool
    """True if rank 0 hosts the store, False if a process that does not fail does, as with torchrun."""

    @property
    def host_fails(self) -> bool:
        return self.rank_0_hosts and self.rank == 0

    def __str__(self) -> str:
        host = "rank 0" if self.rank_0_hosts else "a launcher"
        return (
            f"{self.number}: {self.world_size} ranks, {self.averaging}, store at {host}: {self.kind} on rank "
            f"{self.rank} in {self.place}, step {self.step}, bucket {self.bucket}"
        )


class Saboteur:
    """Fail on one rank, at one step, in one place."""

    def __init__(self, fault: Fault, rank: int, folder: Path) -> None:
        self.step = -1
        self._planted = folder / PLANTED
        self._fault = fault
        self._is_faulty = rank == fault.rank

    def pass_by(self, place: str, bucket: int | None = None) -> None:
        """Fail if this is the place and the time."""
        fault = self._fault
        if not self._is_faulty or place != fault.place or self.step != fault.step:
            return
        if bucket is not None and bucket != fault.bucket:
            return
        self._planted.touch()
        if fault.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.kind])
            time.sleep(60)
        elif fault.kind in ERRORS:
            raise ERRORS[fault.kind]("planted")
        elif fault.kind == "exit":
            sys.exit(3)
        os._exit(3)


class Sabotaged:
    """An exchange that averages as another does, and fails where it is told to."""

    def __init__(self, inner: gradwire.Recipe, saboteur: Saboteur) -> None:
        self.inner = inner
        self.saboteur = saboteur

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner.exchange, name)

    def __repr__(self) -> str:
        return f"Sabotaged({self.inner})"

    def rounds(self, flat: torch.Tensor, context: Any) -> Iterator[Any]:
        self.saboteur.pass_by("exchange", context.layout.index)
        yield from self.inner.exchange.rounds(flat, context)


def run_rank(fault: Fault, rank: int, folder: Path, launcher_port: int, timeout_s: float) -> None:
    """Train one rank, as a script does; raise whatever ends it."""
    store = open_store(fault, rank, folder, launcher_port)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=fault.world_size, timeout=limit)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))
    model = DistributedDataParallel(net, bucket_cap_mb=0.004)
    saboteur = Saboteur(fault, rank, folder)
    model.module.register_forward_pre_hook(lambda module, inputs: saboteur.pass_by("forward"))
    average(model, fault, saboteur)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        saboteur.step = step
        saboteur.pass_by("data")
        optimizer.zero_grad()
        model(torch.randn(4, 10)).square().mean().backward()
        saboteur.pass_by("optimizer")
        optimizer.step()


def open_store(fault: Fault, rank: int, folder: Path, launcher_port: int) -> Store:
    """Connect to the store of the case, or host it."""
    if not fault.rank_0_hosts:
        launcher = TCPStore("127.0.0.1", launcher_port, is_master=False)
        return PrefixStore(f"case {fault.number}", launcher)
    file = folder / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int(file.read_text()), is_master=False)


def average(model: DistributedDataParallel, fault: Fault, saboteur: Saboteur) -> None:
    """Attach or register what the case averages with."""
    if fault.averaging in RECIPES:
        recipe = gradwire.recipe(fault.averaging)
        if fault.place == "exchange":
            exchange: Any = Sabotaged(recipe, saboteur)
            recipe = gradwire.Recipe(f"sabotaged-{recipe.name}", exchange)
        gradwire.attach(model, recipe)
        if fault.place == "hook":  # a tensor hook runs in backward too, between the hooks of buckets
            last = list(model.parameters())[-1 if fault.bucket == 0 else 0]
            last.register_hook(lambda grad: saboteur.pass_by("hook"))
        return

    world: Any = dist.group.WORLD

    def hook(state: object, bucket: GradBucket) -> Any:
        saboteur.pass_by("hook", bucket.index())
        index = bucket.index()
        if fault.averaging == "torch's hook":
            return _after(torch_hooks.allreduce_hook(world, bucket), saboteur, index)
        if fault.averaging == "our raw hook inside a hook":
            return _after(default_hooks.allreduce_hook(None, bucket), saboteur, index)
        flat = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(flat, async_op=True)
        return _after(work.get_future().then(lambda done: done.value()[0]), saboteur, index)

    if fault.averaging in HOOKS:
        gradwire.attach(model, hook)
        return
    group = None
    chosen = default_hooks.allreduce_hook
    if fault.averaging == "raw powersgd":
        group = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
        chosen = powerSGD_hook.powerSGD_hook

    def raw(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        saboteur.pass_by("hook", bucket.index())
        return chosen(state, bucket)

    model.register_comm_hook(group, raw)


def _after(future: Any, saboteur: Saboteur, index: int) -> Any:
    """Fail in the callback of a hook's future, if the fault is in the exchange."""

    def pass_by(done: Any) -> Any:
        saboteur.pass_by("exchange", index)
        return done.value()

    return future.then(pass_by)


def become_rank(fault: Fault, rank: int, folder: Path) -> None:
    """Turn a forked process into a rank: a group of its own, and its output in a file."""
    with contextlib.suppress(OSError):
        os.setpgrp()
    out = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(fault.world_size), LOCAL_RANK=str(rank))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # for ranks that hang
    torch.set_num_threads(1)
