"""Frameworks and scripts that start ranks themselves: make room for them, or refuse them with advice."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from gradwire.scripts.call_notices import before_each_call
from gradwire.scripts.imports import ImportNotice

# The first is the module; its name in torch.multiprocessing is taken by the function.
_SPAWNING = (sys.modules["torch.multiprocessing.spawn"], torch.multiprocessing)
# Frameworks that take the number of ranks from the script, and wait for all of them.
_COUNTING = {"lightning", "lightning_fabric", "pytorch_lightning"}
# Frameworks that start the other ranks themselves, unless they find LOCAL_RANK in the environment.
_LAUNCHING = ("lightning", "lightning_fabric")


class LauncherRefused(RuntimeError):
    """Raised in a script whose framework would wait for ranks that nobody starts, or hide its ranks."""


@contextlib.contextmanager
def watch_launchers(on_spawn: Callable[[], None]) -> Iterator[None]:
    """Call ``on_spawn`` when the script spawns ranks; refuse ranks that would be started twice, or never."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))  # now: launchers change it

    def note_spawn(*_: Any, **__: Any) -> None:
        _refuse_nested_ranks(num_ranks)
        on_spawn()

    def check_size(*args: Any, **kwargs: Any) -> None:
        _refuse_framework(kwargs.get("world_size", args[3] if len(args) > 3 else -1))

    with contextlib.ExitStack() as stack:
        for module in _SPAWNING:
            stack.enter_context(before_each_call(module, "start_processes", note_spawn))
        for module in (dist, dist.distributed_c10d):
            stack.enter_context(before_each_call(module, "init_process_group", check_size))
        yield


@contextlib.contextmanager
def hide_from_launchers(variables: Mapping[str, str]) -> Iterator[None]:
    """Remove environment variables when a framework is imported that starts ranks itself.

    With a LOCAL_RANK in the environment it would start none, and wait for them.
    """

    def remove(_: ModuleType) -> None:
        for name, value in variables.items():
            if os.environ.get(name) == value:
                del os.environ[name]

    with _when_imported(_LAUNCHING, remove):
        yield


@contextlib.contextmanager
def refuse_launchers() -> Iterator[None]:
    """Raise `LauncherRefused` where a script starts ranks of its own, which nobody would measure."""

    def refuse_ray(module: ModuleType) -> None:
        module.TorchTrainer.fit = _refusing(
            "Ray starts workers of its own, which `gradwire headroom` cannot measure. Measure the "
            "training function alone, in a script that calls dist.init_process_group and then it"
        )

    refuse_spawn = _refusing(
        "the script starts processes itself (torch.multiprocessing.spawn), and `gradwire headroom` cannot "
        "measure those. Let the script be one rank that reads RANK and WORLD_SIZE, as under torchrun, and "
        "let --ranks start them"
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_when_imported(("ray.train.torch",), refuse_ray))
        for module in _SPAWNING:
            stack.enter_context(before_each_call(module, "start_processes", refuse_spawn))
        yield


def _refusing(text: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        raise LauncherRefused(text)

    return refuse


@contextlib.contextmanager
def _when_imported(names: Iterable[str], then: Callable[[ModuleType], None]) -> Iterator[None]:
    notices = [ImportNotice(name, then) for name in names]
    for notice in notices:
        notice.watch()
    try:
        yield
    finally:
        for notice in notices:
            notice.ignore()


def _refuse_nested_ranks(num_ranks: int) -> None:
    """Raise LauncherRefused if this is one of several ranks, and has not joined the others yet."""
    if num_ranks > 1 and not dist.is_initialized():
        raise LauncherRefused(
            f"the script starts processes itself (torch.multiprocessing.spawn), and would do so in each of "
            f"{num_ranks} ranks. Start it once, without torchrun and without --ranks; gradwire reaches the "
            "processes that it starts: gradwire run --recipe RECIPE -- SCRIPT"
        )


def _refuse_framework(world_size: int) -> None:
    """Raise LauncherRefused if a framework in the stack wants another number of ranks than there are."""
    num_ranks = os.environ.get("WORLD_SIZE", "")
    size = world_size if world_size > 0 else int(num_ranks or "1")
    if not num_ranks or size == int(num_ranks):
        return
    frame: FrameType | None = sys._getframe(2)
    names = set()
    while frame is not None:
        names.add(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    if found := names & _COUNTING:
        raise LauncherRefused(
            f"{found.pop()} wants {size} ranks, and this run has {num_ranks}: it would wait for ranks that "
            f"nobody starts. Pass --ranks {size}, or give the script's trainer as many devices as WORLD_SIZE"
        )
