"""Selectors of parameters by name, shape and size."""

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
    "ndim": lambda slot: len(slot.parameter_shape),
    "numel": lambda slot: slot.parameter_shape.numel(),
}


@dataclass(frozen=True)
class Selector:
    """One or more conditions on a parameter, separated by ``&``; all must hold.

    A condition is a pattern of names as in ``fnmatch`` (``*.norm*``), a bound (``ndim<2``,
    ``numel>=65536``), or a shape with ``*`` for any size (``(50257, *)``). Raises ValueError for other text.

    >>> embedding = Slot("embed.weight", 0, torch.Size([50, 20]), (20, 1))
    >>> Selector("embed.* & numel>=1000").fits(embedding)
    True
    """

    text: str

    def __post_init__(self) -> None:
        if "=" in re.sub("<=|>=", "", self.text) or ";" in self.text:
            raise ValueError(
                f"the route's pattern {self.text!r} must have no ';', and no '=' except in '<=' and '>='"
            )
        for condition in self._conditions:
            _parse_condition(condition)
        if self.text.count("(") != self.text.count(")"):
            raise ValueError(f"the route's pattern {self.text!r} must close the parentheses that it opens")

    def __str__(self) -> str:
        return self.text

    @property
    def _conditions(self) -> list[str]:
        return [part.strip() for part in self.text.split("&")]

    def fits(self, slot: Slot) -> bool:
        """Return True if a parameter meets all conditions; a complex one counts as pairs of real values."""
        return all(_parse_condition(condition)(slot) for condition in self._conditions)


def _parse_condition(condition: str) -> Callable[[Slot], bool]:
    if not condition:
        raise ValueError("a route has an empty pattern; '*' fits every parameter")
    if condition.startswith("("):
        return _parse_shape(condition)
    if "<" in condition or ">" in condition:
        return _parse_comparison(condition)
    return lambda slot: fnmatchcase(slot.name, condition)


def _parse_comparison(condition: str) -> Callable[[Slot], bool]:
    found = _COMPARISON.fullmatch(condition)
    if found is None or found[1] not in _FIGURES:
        raise ValueError(
            f"a route must compare ndim or numel with a number, as in 'ndim<2', not {condition!r}"
        )
    figure, compare, bound = _FIGURES[found[1]], _OPERATORS[found[2]], int(found[3])
    return lambda slot: compare(figure(slot), bound)


def _parse_shape(condition: str) -> Callable[[Slot], bool]:
    inside = condition.removeprefix("(").removesuffix(")").strip().removesuffix(",")
    sizes = [size.strip() for size in inside.split(",")] if inside else []
    if not condition.endswith(")") or not all(size == "*" or re.fullmatch(_NUMBER, size) for size in sizes):
        raise ValueError(
            f"a route's shape must be made of numbers and '*', as in '(50257, *)', not {condition!r}"
        )

    wanted = [None if size == "*" else int(size) for size in sizes]

    def fits(slot: Slot) -> bool:
        shape = slot.parameter_shape
        return len(shape) == len(wanted) and all(
            bound in (None, size) for bound, size in zip(wanted, shape, strict=True)
        )

    return fits
