"""What is made once for an object, and ends with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
P = ParamSpec("P")
T = TypeVar("T")


def cached_on_owner(make: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Call ``make`` once for each of its arguments, and keep what it returns in the first of them.

    Unlike with `functools.cache`, a process that trains many models, one after the other, does not hold the
    tables of all of them; and the first argument, often large, is not hashed.

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
        # As functools.cached_property does it: also an object whose fields are frozen has this.
        made = owner.__dict__.setdefault("_kept", {})
        key = make, args, *kwargs.items()
        if key not in made:
            # Of two threads that make the same, both get the one that was first.
            made.setdefault(key, make(owner, *args, **kwargs))
        found: T = made[key]
        return found

    return find
