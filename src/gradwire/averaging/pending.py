"""Buckets that wait for later buckets of the same step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from gradwire.errors import Place
from gradwire.lanes import Promise


class HasPromise(Protocol):
    """An item with the promise of a bucket's result, and the bucket's place."""

    @property
    def promise(self) -> Promise: ...

    @property
    def place(self) -> Place: ...


T = TypeVar("T", bound=HasPromise)


class Pending(Generic[T]):
    """The waiting buckets of one step, in order."""

    def __init__(self) -> None:
        self._items: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        """Let ``item`` wait. Drop items of a backward pass that broke off: nobody waits for those."""
        if self._items and self._items[-1].place.bucket >= item.place.bucket:
            self._items.clear()
        self._items.append(item)

    def take(self) -> list[T]:
        """Remove and return all waiting items."""
        items, self._items = self._items, []
        return items

    def give_up(self) -> None:
        """Complete all waiting items with their values as they are; no later bucket will come."""
        for item in self.take():
            item.promise.give_up()
