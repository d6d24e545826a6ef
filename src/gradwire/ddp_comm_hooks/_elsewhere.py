"""Attributes of torch's classes that ours do not have."""

from __future__ import annotations

from typing import Any, NoReturn


class Elsewhere:
    """An attribute that only torch's class has; reading or setting it raises AttributeError.

    The text says what to use ``instead``. ``hasattr`` returns False.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._text = f"gradwire's {owner.__name__} has no {name}, unlike torch's: {self._instead}"

    def __get__(self, state: object, owner: type) -> Elsewhere:
        if state is None:
            return self
        raise AttributeError(self._text)

    def __set__(self, state: object, value: Any) -> NoReturn:
        raise AttributeError(self._text)
