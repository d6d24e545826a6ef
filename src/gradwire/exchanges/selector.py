"""Which parameters a route is for: by name, shape and size."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch  # noqa: F401  # for the example below

from gradwire.buckets import Slot

_NUMBER = "[0-9]+(?:_[0-9]+)*"
_COMPARISON = re.compile(rf"(\w*)\s*(<=|>=|<|>)\s*({_NUMBER})")
_OPERATORS: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_FIGURES: dict[str, Callable[[Slot], int]] = {
    "ndim": lambda slot: len(slot.shape),
    "numel": lambda slot: slot.numel,
}


@dataclass(frozen=True)
class Selector:
    """One or more conditions that a parameter meets, separated by ``&``.

    A condition is a pattern of names as ``fnmatch`` has it (``*.norm*``), a bound on a figure (``ndim<2``,
    ``numel>=65536``), or a shape with ``*`` for any size: ``(50257, *)``. Raises ValueError for another.

    >>> embedding = Slot("embed.weight", 0, torch.Size([50, 20]), (20, 1))
    >>> Selector("embed.* & numel>=1000").fits(embedding)
    True
    """

    text: str

    def __post_init__(self) -> None:
        if "=" in re.sub("<=|>=", "", self.text) or ";" in self.text:
            raise ValueError(
                f"a route's pattern has no ';', and no '=' but in '<=' and '>=', unlike {self.text!r}"
            )
        for condition in self._conditions:
            _meaning(condition)
        if self.text.count("(") != self.text.count(")"):
            raise ValueError(f"a route's pattern closes the parentheses that it opens, unlike {self.text!r}")

    def __str__(self) -> str:
        return self.text

    @property
    def _conditions(self) -> list[str]:
        return [part.strip() for part in self.text.split("&")]

    def fits(self, slot: Slot) -> bool:
        """Whether a parameter meets all conditions; a complex one counts as pairs, as in its bucket."""
        return all(_meaning(condition)(slot) for condition in self._conditions)


def _meaning(condition: str) -> Callable[[Slot], bool]:
    if not condition:
        raise ValueError("a route has an empty pattern; '*' fits every parameter")
    if condition.startswith("("):
        return _shape(condition)
    if "<" in condition or ">" in condition:
        return _comparison(condition)
    return lambda slot: fnmatchcase(slot.name, condition)


def _comparison(condition: str) -> Callable[[Slot], bool]:
    found = _COMPARISON.fullmatch(condition)
    if found is None or found[1] not in _FIGURES:
        raise ValueError(
            f"a route compares ndim or numel with a number, as in 'ndim<2', unlike {condition!r}"
        )
    figure, compare, bound = _FIGURES[found[1]], _OPERATORS[found[2]], int(found[3])
    return lambda slot: compare(figure(slot), bound)


def _shape(condition: str) -> Callable[[Slot], bool]:
    inside = condition.removeprefix("(").removesuffix(")").strip().removesuffix(",")
    sizes = [size.strip() for size in inside.split(",")] if inside else []
    if not condition.endswith(")") or not all(size == "*" or re.fullmatch(_NUMBER, size) for size in sizes):
        raise ValueError(f"a route's shape is of numbers and '*', as in '(50257, *)', unlike {condition!r}")

    wanted = [None if size == "*" else int(size) for size in sizes]

    def fits(slot: Slot) -> bool:
        return len(slot.shape) == len(wanted) and all(
            bound in (None, size) for bound, size in zip(wanted, slot.shape, strict=True)
        )

    return fits
