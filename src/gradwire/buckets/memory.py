"""What exchanges remember from step to step, by parameter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.buckets.layout import BucketLayout, NamedState, as_real

T = TypeVar("T")


class Memory:
    """Named states of a wire: each holds a value for every value of every parameter.

    Buckets that are exchanged at the same time may ask for their states at the same time; whatever is of
    all parameters is for when none is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[tuple[str, torch.dtype], NamedState] = {}
        self._made: dict[Hashable, Any] = {}

    def flat(
        self,
        name: str,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        may_change: bool = False,
    ) -> Tensor:
        """The state called ``name`` of a bucket's parameters, flat, to read and to write; at first zero.

        Complex parameters have complex states, here as pairs of fp32. If shapes ``may_change``, what had
        another one is zero again; else that is an error.
        """
        with self._lock:
            flat = self._state(*_key(name, layout, dtype)).flat(layout, device, may_change=may_change)
        return as_real(flat)

    def has(self, name: str, layout: BucketLayout, dtype: torch.dtype) -> bool:
        """Whether any of a bucket's parameters has a state called ``name`` in ``dtype``."""
        with self._lock:
            state = self._states.get(_key(name, layout, dtype))
            return state is not None and state.has(layout)

    def drop(self, name: str, layout: BucketLayout, dtype: torch.dtype) -> None:
        """Forget that state of a bucket's parameters."""
        with self._lock:
            self._states[_key(name, layout, dtype)].drop(layout)

    def rescale(self, name: str, factor: Tensor) -> None:
        """Multiply the states called ``name`` of all parameters by a number, on whatever device it is."""
        for (each, _), state in self._states.items():
            if each == name:
                for flat in state.flats():
                    flat.mul_(factor.to(flat.device))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns, made once; for what need not be saved, since it can be made again."""
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
            made: T = self._made[key]
        return made

    def load(self, named: dict[str, dict[str, Tensor]]) -> None:
        """Forget everything, and take what `named` has returned elsewhere."""
        self._states.clear()
        for name, values in named.items():
            for parameter, value in values.items():
                self._state(name, value.dtype).put(parameter, value)

    def _state(self, name: str, dtype: torch.dtype) -> NamedState:
        return self._states.setdefault((name, dtype), NamedState(dtype))

    def named(self) -> dict[str, dict[str, Tensor]]:
        """Every state as views by parameter: ``named()["residual"]["fc.weight"]``."""
        merged: dict[str, dict[str, Tensor]] = {}
        for (name, _), state in self._states.items():
            merged.setdefault(name, {}).update(state.named())
        return merged

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of every state, by name and parameter: ``state_dict()["residual:float32"]["fc.weight"]``."""
        return {
            f"{name}:{_dtype_name(dtype)}": {key: view.clone() for key, view in views.items()}
            for (name, dtype), state in self._states.items()
            if (views := state.named())
        }

    def load_state_dict(self, states: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
        """Hold these states, as `state_dict` gives them, and nothing else."""
        self._states.clear()
        for key, tensors in states.items():
            name, _, dtype = key.rpartition(":")
            for parameter, values in tensors.items():
                self._state(name, getattr(torch, dtype)).put(parameter, values.to(device))


def _key(name: str, layout: BucketLayout, dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """Where a state of a bucket is kept: that of complex parameters is complex, whatever is asked for."""
    return name, torch.complex64 if layout.dtype.is_complex else dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
