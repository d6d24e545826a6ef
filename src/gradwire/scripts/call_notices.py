"""Act before or after each call of a function of torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from gradwire.ddp import replaced


@contextlib.contextmanager
def before_each_call(owner: Any, name: str, act: Callable[..., None]) -> Iterator[None]:
    """Call ``act`` with the arguments of each call of ``owner.name``, before it; it may raise instead."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return function(*args, **kwargs)

    with replaced(owner, name, noted):
        yield


@contextlib.contextmanager
def after_each_call(owner: Any, name: str, act: Callable[..., None]) -> Iterator[None]:
    """Call ``act`` with the arguments of each call of ``owner.name`` that has returned."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        act(*args, **kwargs)
        return result

    with replaced(owner, name, noted):
        yield
