"""What gradwire knows of hook functions of its own, beyond that they can be called."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradwire.recipes import Recipe

Hook = Callable[..., Any]


@dataclass(frozen=True)
class HookInfo:
    """Of any other hook, nothing."""

    recipe: Recipe | None = None
    """What the hook does, as a recipe, which `attach` takes instead of it."""
    wraps: Hook | None = None
    """The hook that this one calls with its own state."""
    prepare: Callable[[DistributedDataParallel], None] | None = None
    """To be called once, with the model that the hook is for."""


# By the function itself: attributes would be copied by functools.wraps to what somebody wraps around it, and
# there are objects that have every attribute one asks for.
_known: weakref.WeakKeyDictionary[FunctionType, HookInfo] = weakref.WeakKeyDictionary()


def register_hook_info(hook: Hook, known: HookInfo) -> None:
    """Note what a function of ours is."""
    assert isinstance(hook, FunctionType)
    _known[hook] = known


def hook_info(hook: object) -> HookInfo:
    """What is known of a hook; nothing, if it is not ours."""
    return _known.get(hook, HookInfo()) if isinstance(hook, FunctionType) else HookInfo()
