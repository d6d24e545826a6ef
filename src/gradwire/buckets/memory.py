"""The state that exchanges keep from step to step, by parameter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.buckets.dtypes import dtype_name, dtype_named
from gradwire.buckets.layout import BucketLayout, as_real
from gradwire.buckets.parameter_state import ParameterState

T = TypeVar("T")

# Steps for which `Memory.cached` keeps what nobody asks for: a loop may have a few lists of tensors in turns.
_STEPS_KEPT = 16

GRADIENT_STATES = ("residual", "velocity")
"""States in units of a rank's own gradient. They follow the loss scale and the number of ranks and shards."""


class Memory:
    """The states of a wire, by name; each holds one value for every value of every parameter.

    Threads that exchange different buckets may call `flat`, `has`, `dtypes`, `owes`, `drop` and `cached` at
    once. Methods that concern all parameters must be called while no bucket is exchanged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[tuple[str, torch.dtype], ParameterState] = {}
        self._num_replaced = 0
        self._cache: dict[Hashable, tuple[Any, int]] = {}
        """What was made for each key, and the step that has last asked for it."""

    def flat(
        self,
        name: str,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        may_change: bool = False,
    ) -> Tensor:
        """Return the state ``name`` of a bucket's parameters as one flat tensor, to read and to write.

        It is zero at first. Complex parameters have complex states, returned as pairs of fp32. If shapes
        ``may_change``, a parameter whose shape has changed starts at zero again; if not, that raises
        ValueError.
        """
        with self._lock:
            flat = self._state(*_key(name, layout, dtype)).flat(layout, device, may_change=may_change)
        return as_real(flat)

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever a state may lie elsewhere in memory than before, or is there no more."""
        with self._lock:
            return self._num_replaced, sum(state.num_moves for state in self._states.values())

    def has(self, name: str, layout: BucketLayout, dtype: torch.dtype) -> bool:
        """Return True if any of a bucket's parameters has a state ``name`` in ``dtype``."""
        with self._lock:
            state = self._states.get(_key(name, layout, dtype))
            return state is not None and state.has(layout)

    def dtypes(self, name: str) -> list[torch.dtype]:
        """Return the dtypes in which parameters have, or have had, a state ``name``."""
        with self._lock:
            return [dtype for each, dtype in self._states if each == name]

    def owes(self, layout: BucketLayout) -> bool:
        """Return True if any of a bucket's parameters has a residual or a velocity, in any dtype."""
        with self._lock:
            return any(
                name in GRADIENT_STATES and state.has(layout) for (name, _), state in self._states.items()
            )

    @property
    def holds_gradients(self) -> bool:
        """True if any parameter has, or has had, a residual or a velocity."""
        with self._lock:
            return any(name in GRADIENT_STATES for name, _ in self._states)

    def drop(self, name: str, layout: BucketLayout, dtype: torch.dtype) -> None:
        """Forget the state ``name`` of a bucket's parameters."""
        with self._lock:
            self._states[_key(name, layout, dtype)].drop(layout)

    def cached(self, key: Hashable, step: int, make: Callable[[], T]) -> T:
        """Return what ``make`` has returned for this key before; checkpoints do not hold it.

        When another key comes, what no step has asked for lately is forgotten.
        """
        with self._lock:
            if key in self._cache:
                made: T = self._cache[key][0]
            else:
                self._forget_unused(step)
                made = make()
            self._cache[key] = made, step
        return made

    def keep_gradient_states(self) -> None:
        """Forget all states but residuals and velocities."""
        self._replace({key: state for key, state in self._states.items() if key[0] in GRADIENT_STATES})

    def rescale(self, factor: Tensor) -> None:
        """Multiply residuals and velocities by ``factor``, which may be on any device."""
        for (name, _), state in self._states.items():
            if name in GRADIENT_STATES:
                for flat in state.flats():
                    flat.mul_(factor.to(flat.device))

    def named(self) -> dict[str, dict[str, Tensor]]:
        """Return views of every state, by name and parameter: ``named()["residual"]["fc.weight"]``."""
        merged: dict[str, dict[str, Tensor]] = {}
        for (name, _), state in self._states.items():
            merged.setdefault(name, {}).update(state.named())
        return merged

    def load(self, named: dict[str, dict[str, Tensor]]) -> None:
        """Replace all states by ``named``, in the form that `named` returns."""
        self._replace({})
        for name, values in named.items():
            for parameter, value in values.items():
                self._state(name, value.dtype).put(parameter, value)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of every state: ``state_dict()["residual:float32"]["fc.weight"]``."""
        return {
            f"{name}:{dtype_name(dtype)}": {key: view.clone() for key, view in views.items()}
            for (name, dtype), state in self._states.items()
            if (views := state.named())
        }

    def load_state_dict(self, states: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
        """Replace all states by ``states``, in the form that `state_dict` returns.

        Raises ValueError, and changes nothing, if a key does not end with the name of a dtype.
        """
        loaded: dict[tuple[str, torch.dtype], ParameterState] = {}
        for key, tensors in states.items():
            name, _, text = key.rpartition(":")
            dtype = dtype_named(text)
            state = loaded.setdefault((name, dtype), ParameterState(dtype))
            for parameter, values in tensors.items():
                state.put(parameter, values.to(device))
        self._replace(loaded)

    def _forget_unused(self, step: int) -> None:
        old = [key for key, (_, last_step) in self._cache.items() if last_step < step - _STEPS_KEPT]
        for key in old:
            del self._cache[key]
        self._num_replaced += bool(old)  # a recording that is replayed reads it without asking

    def _replace(self, states: dict[tuple[str, torch.dtype], ParameterState]) -> None:
        self._states = states
        self._num_replaced += 1

    def _state(self, name: str, dtype: torch.dtype) -> ParameterState:
        return self._states.setdefault((name, dtype), ParameterState(dtype))


def is_gradient_state(key: str) -> bool:
    """Return True for the key of a residual or a velocity in a state, such as ``"residual:float32"``."""
    return key.rpartition(":")[0] in GRADIENT_STATES


def _key(name: str, layout: BucketLayout, dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """Return the key of a bucket's state; complex buckets have complex states, whatever ``dtype`` is."""
    return name, torch.complex64 if layout.dtype.is_complex else dtype
