"""Watch what a script does besides making models: its optimizer steps, and ranks that it starts itself."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

SPAWN_HINT = (
    "the script starts processes itself (torch.multiprocessing.spawn), and gradwire cannot reach those. Let "
    "the script be one rank that reads RANK and WORLD_SIZE, as under torchrun, and let --ranks start them; "
    "or call gradwire.attach in the function that is spawned"
)
# Frameworks that start the other ranks themselves, unless they find LOCAL_RANK in the environment.
_LAUNCHING = {"lightning", "lightning_fabric", "pytorch_lightning"}


class LauncherRefused(RuntimeError):
    """Raised in a script whose framework would wait for ranks that nobody starts."""


@dataclass
class Observations:
    """What has been seen so far."""

    num_optimizer_steps: int = 0
    has_spawned: bool = False
    on_save: Callable[[], None] = lambda: None
    """Called when the script has saved something with ``torch.save``."""


@contextlib.contextmanager
def observe(*, is_only_rank: bool = False) -> Iterator[Observations]:
    """Observe the script that runs inside this context.

    With ``is_only_rank``, this process has the environment of a single rank. A framework that wants more
    ranks then gets a `LauncherRefused`.
    """
    seen = Observations()

    def count(*_: Any) -> None:
        seen.num_optimizer_steps += 1

    def note_spawn(start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.has_spawned = True
            return start(*args, **kwargs)

        return noted

    def note_save(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def noted(*args: Any, **kwargs: Any) -> Any:
            saved = save(*args, **kwargs)
            seen.on_save()
            return saved

        return noted

    def check_size(init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def checked(*args: Any, **kwargs: Any) -> Any:
            _refuse_framework(kwargs.get("world_size", args[3] if len(args) > 3 else -1))
            return init(*args, **kwargs)

        return checked

    # The module, whose name in torch.multiprocessing is taken by the function.
    spawning = sys.modules["torch.multiprocessing.spawn"]
    handle = register_optimizer_step_post_hook(count)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_replaced(torch, "save", note_save))
            for module in (spawning, torch.multiprocessing):
                stack.enter_context(_replaced(module, "start_processes", note_spawn))
            for module in (dist, dist.distributed_c10d) if is_only_rank else ():
                stack.enter_context(_replaced(module, "init_process_group", check_size))
            yield seen
    finally:
        handle.remove()


@contextlib.contextmanager
def _replaced(
    module: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, change(before))
    try:
        yield
    finally:
        setattr(module, name, before)


def _refuse_framework(world_size: int) -> None:
    """Raise LauncherRefused if a framework in the stack wants more ranks than this one."""
    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
    frame: FrameType | None = sys._getframe(2)
    names = set()
    while frame is not None:
        names.add(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    found = names & _LAUNCHING
    if size > 1 and found:
        raise LauncherRefused(
            f"{found.pop()} wants {size} ranks, but `gradwire run` without --ranks is a single one, and the "
            f"framework starts no others. Start all of them: gradwire run --ranks {size} ..."
        )
