"""What waits for later buckets of the same step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from gradwire.errors import Place
from gradwire.lanes import Promise


class Waiting(Protocol):
    """A bucket with a promise to keep."""

    @property
    def promise(self) -> Promise: ...

    @property
    def place(self) -> Place: ...


T = TypeVar("T", bound=Waiting)


class Pending(Generic[T]):
    """The buckets of one step that wait, in order. One way to keep them, and one way to give them up."""

    def __init__(self) -> None:
        self._items: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        """Let ``item`` wait. Buckets of a backward pass that broke off are dropped: nobody waits for them."""
        if self._items and self._items[-1].place.bucket >= item.place.bucket:
            self._items.clear()
        self._items.append(item)

    def take(self) -> list[T]:
        """Return all that wait, which then do not wait any more."""
        items, self._items = self._items, []
        return items

    def give_up(self) -> None:
        """Complete all that wait with their values as they are: no later bucket will come."""
        for item in self.take():
            item.promise.give_up()
