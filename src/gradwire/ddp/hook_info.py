"""Facts about hooks: registered facts of our own hooks, names, and the runners that a hook uses."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from gradwire.recipes import Recipe

if TYPE_CHECKING:
    from gradwire.ddp.runner import Runner

Hook = Callable[..., Any]
"""A DDP communication hook, called with ``(state, bucket)``."""


@dataclass(frozen=True)
class HookInfo:
    """Facts about one of our hooks; all fields are None for any other hook."""

    recipe: Recipe | None = None
    """The recipe that the hook runs; `attach` takes it instead of the hook."""
    wraps: Hook | None = None
    """The hook that this one calls with its own state."""
    prepare: Callable[[DistributedDataParallel], None] | None = None
    """Prepares the model; called once when the hook is attached."""


# Keyed by the function itself. An attribute would not do: functools.wraps copies attributes to wrappers, and
# some objects claim to have every attribute.
_infos: weakref.WeakKeyDictionary[FunctionType, HookInfo] = weakref.WeakKeyDictionary()


def register_hook_info(hook: Hook, info: HookInfo) -> None:
    """Register the facts about one of our hooks."""
    assert isinstance(hook, FunctionType)
    _infos[hook] = info


def hook_info(hook: object) -> HookInfo:
    """Return the facts about a hook; an empty `HookInfo` for hooks that are not ours."""
    return _infos.get(hook, HookInfo()) if isinstance(hook, FunctionType) else HookInfo()


def hook_name(hook: Callable[..., Any]) -> str:
    """Return ``module.qualname`` of a function, a partial's function or a callable object's class.

    A function made by ``exec`` has no module: return its qualname alone.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return ".".join(filter(None, (named.__module__, named.__qualname__)))


_calls = threading.local()


@contextlib.contextmanager
def record_runners() -> Iterator[list[Runner]]:
    """Collect the runners used inside this context.

    A user's hook may call our hooks. Their futures never fail, so the caller asks their runners for errors.
    """
    outer, _calls.used = getattr(_calls, "used", None), []
    try:
        yield _calls.used
    finally:
        _calls.used = outer


def record_use(runner: Runner) -> None:
    """Note that the user's hook under way, if there is one, uses ``runner``."""
    used = getattr(_calls, "used", None)
    if used is not None:
        used.append(runner)
