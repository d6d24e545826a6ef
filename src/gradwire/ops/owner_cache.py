"""A cache of a function's results that lives and dies with the function's first argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
P = ParamSpec("P")
T = TypeVar("T")

# The attribute of an owner that holds its results.
_ATTRIBUTE = "_cached_results"


def cached_on_owner(make: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Call ``make`` once per set of arguments, and store the results on the first argument, the owner.

    `functools.cache` would keep every owner and its results alive for as long as the process runs, and would
    hash the owner, which is often large. Here the results are freed together with the owner.

    >>> class Model:
    ...     pass
    >>> @cached_on_owner
    ... def table(model, size):
    ...     return [0] * size
    >>> model = Model()
    >>> table(model, 3) is table(model, 3)
    True
    >>> table(model, 3) is table(Model(), 3)
    False
    """

    @functools.wraps(make)
    def find(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # By way of __dict__, as in functools.cached_property: frozen dataclasses refuse setattr.
        results = owner.__dict__.setdefault(_ATTRIBUTE, {})
        key = make, args, *kwargs.items()
        if key not in results:
            # setdefault is atomic: two threads that call at once both get the first result.
            results.setdefault(key, make(owner, *args, **kwargs))
        found: T = results[key]
        return found

    return find
