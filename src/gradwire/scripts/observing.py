"""Watch what a script does besides making models: its optimizer steps, its files, ranks that it spawns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gradwire.scripts.call_notices import after_each_call
from gradwire.scripts.launchers import watch_launchers


@dataclass
class Observations:
    """The observations so far."""

    num_optimizer_steps: int = 0
    has_spawned: bool = False
    on_save: Callable[[], None] = lambda: None
    """Called when the script has saved something with ``torch.save``."""


@contextlib.contextmanager
def observe() -> Iterator[Observations]:
    """Observe the script that runs inside this context.

    A framework that wants another number of ranks than there are gets a `LauncherRefused`; so does a script
    that starts ranks itself in each of several ranks.
    """
    seen = Observations()

    def count_step(*_: Any) -> None:
        seen.num_optimizer_steps += 1

    def note_spawn() -> None:
        seen.has_spawned = True

    def note_save(*_: Any, **__: Any) -> None:
        seen.on_save()

    with (
        _after_optimizer_steps(count_step),
        after_each_call(torch, "save", note_save),
        watch_launchers(note_spawn),
    ):
        yield seen


@contextlib.contextmanager
def watch_steps(then: Callable[[Optimizer], None]) -> Iterator[None]:
    """Call ``then`` with an optimizer after each of its steps, also after those that a GradScaler drops."""

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        then(optimizer)

    def after_scaled_step(_: GradScaler, optimizer: Optimizer, *__: Any, **___: Any) -> None:
        then(optimizer)

    with _after_optimizer_steps(after_step), after_each_call(GradScaler, "step", after_scaled_step):
        yield


@contextlib.contextmanager
def _after_optimizer_steps(act: Callable[..., None]) -> Iterator[None]:
    handle = register_optimizer_step_post_hook(act)
    try:
        yield
    finally:
        handle.remove()
