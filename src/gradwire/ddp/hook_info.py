"""Facts about hooks: those registered for hooks of ours, names, and which runners a hook uses."""

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


@dataclass(frozen=True)
class HookInfo:
    """Facts about a hook of ours; for any other hook, all fields are None."""

    recipe: Recipe | None = None
    """The recipe that the hook runs; `attach` takes it instead of the hook."""
    wraps: Hook | None = None
    """The hook that this one calls with its own state."""
    prepare: Callable[[DistributedDataParallel], None] | None = None
    """Called once, with the model that the hook is for."""


# By the function itself: functools.wraps would copy attributes to what somebody wraps around it, and some
# objects have every attribute one asks for.
_infos: weakref.WeakKeyDictionary[FunctionType, HookInfo] = weakref.WeakKeyDictionary()


def register_hook_info(hook: Hook, info: HookInfo) -> None:
    """Note the facts about a hook of ours."""
    assert isinstance(hook, FunctionType)
    _infos[hook] = info


def hook_info(hook: object) -> HookInfo:
    """Return the facts about a hook; an empty `HookInfo` for hooks that are not ours."""
    return _infos.get(hook, HookInfo()) if isinstance(hook, FunctionType) else HookInfo()


def hook_name(hook: Callable[..., Any]) -> str:
    """Return ``module.qualname`` of a function, a partial's function or a callable object's class.

    Functions made by ``exec`` have no module; theirs is the name alone.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return ".".join(filter(None, (named.__module__, named.__qualname__)))


_calls = threading.local()


@contextlib.contextmanager
def noting_runners() -> Iterator[list[Runner]]:
    """Collect the runners used inside: a hook may call hooks of ours, whose futures never fail."""
    outer, _calls.used = getattr(_calls, "used", None), []
    try:
        yield _calls.used
    finally:
        _calls.used = outer


def note_use(runner: Runner) -> None:
    """Tell the hook that is being called, if one is, that it depends on ``runner``."""
    used = getattr(_calls, "used", None)
    if used is not None:
        used.append(runner)
