"""What exchanges remember from step to step, by parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.layout import BucketLayout, NamedState


class Memory:
    """Named states of a wire: each holds a value for every value of every parameter."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, torch.dtype], NamedState] = {}

    def flat(self, name: str, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The state called ``name`` of a bucket's parameters, flat, to read and to write; at first zero.

        Complex parameters have complex states, here as pairs of fp32.
        """
        if layout.dtype.is_complex:
            dtype = torch.complex64
        state = self._states.get((name, dtype))
        if state is None:
            state = self._states[name, dtype] = NamedState(dtype)
        flat = state.flat(layout, device)
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

    def named(self) -> dict[str, dict[str, Tensor]]:
        """Every state as views by parameter: ``named()["residual"]["fc.weight"]``."""
        merged: dict[str, dict[str, Tensor]] = {}
        for (name, _), state in self._states.items():
            merged.setdefault(name, {}).update(state.named())
        return merged
