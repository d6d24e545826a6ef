"""State that follows parameters from bucket to bucket."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.buckets.layout import BucketLayout, Slot, row_by_row


class ParameterState:
    """One flat tensor per bucket, whose values belong to parameters and follow them between buckets.

    When the reducer rebuilds its buckets, each parameter's values move with it. A parameter that has none
    yet starts at zero. Values are kept in the parameter's own order in memory.

    >>> a = BucketLayout(0, torch.float32, (Slot("w", 0, torch.Size([2]), (1,)),))
    >>> b = BucketLayout(0, torch.float32, (Slot("v", 0, torch.Size([1]), (1,)),
    ...                                     Slot("w", 1, torch.Size([2]), (1,))))
    >>> state = ParameterState()
    >>> state.flat(a).copy_(torch.tensor([3.0, 4.0]))
    tensor([3., 4.])
    >>> state.flat(b)
    tensor([0., 3., 4.])
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._flats: dict[str, _FlatState] = {}
        self.num_moves = 0
        """The number of times that values have moved to other memory, or have been forgotten."""

    def flat(
        self, layout: BucketLayout, device: torch.device | str = "cpu", *, may_change: bool = False
    ) -> Tensor:
        """Return the state of a bucket's parameters as one flat tensor, to read and to write.

        If shapes ``may_change``, a parameter whose shape has changed starts at zero again; if not, that
        raises ValueError.
        """
        old = self._flats.get(layout.slots[0].name)
        if (
            old is not None
            and old.layout == layout
            and all(self._flats.get(slot.name) is old for slot in layout.slots)
        ):
            return old.flat
        new = _FlatState(layout, torch.zeros(layout.numel, dtype=self._dtype, device=device))
        for slot in layout.slots:
            old = self._flats.get(slot.name)
            if old is not None and not (may_change and old.view(slot.name).shape != slot.shape):
                new.view(slot.name).copy_(_require_shape(slot, old.view(slot.name)))
        self.num_moves += 1
        # This frees flat tensors that hold no parameter's values any more.
        self._flats.update((slot.name, new) for slot in layout.slots)
        return new.flat

    def put(self, name: str, value: Tensor) -> None:
        """Set a parameter's state to a copy of ``value``, whatever bucket it will lie in."""
        self.num_moves += 1
        flat = value.detach().to(self._dtype).contiguous().flatten().clone()
        slot = Slot(name, 0, value.shape, row_by_row(value.shape))
        self._flats[name] = _FlatState(BucketLayout(-1, self._dtype, (slot,)), flat)

    def drop(self, layout: BucketLayout) -> None:
        """Forget the state of a bucket's parameters."""
        self.num_moves += 1
        for slot in layout.slots:
            self._flats.pop(slot.name, None)

    def has(self, layout: BucketLayout) -> bool:
        """Return True if any of a bucket's parameters has a state."""
        return any(slot.name in self._flats for slot in layout.slots)

    def flats(self) -> list[Tensor]:
        """Return every flat tensor once; one may also hold values of parameters that have moved elsewhere."""
        return list({id(state): state.flat for state in self._flats.values()}.values())

    def named(self) -> dict[str, Tensor]:
        """Return views of every parameter's state, by name."""
        return {name: state.view(name) for name, state in self._flats.items()}


@dataclass(frozen=True)
class _FlatState:
    """A flat tensor and the layout of the parameters in it."""

    layout: BucketLayout
    flat: Tensor

    @functools.cached_property
    def _slots(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.layout.slots}

    def view(self, name: str) -> Tensor:
        return self._slots[name].view(self.flat)


def _require_shape(slot: Slot, old: Tensor) -> Tensor:
    """Return ``old`` if it has the parameter's shape; raise ValueError if not."""
    if old.shape != slot.shape:
        raise ValueError(
            f"parameter {slot.name} had shape {tuple(old.shape)} and now has {tuple(slot.shape)}: "
            "its state cannot be carried over. Attach again to begin with an empty one; in an Averager, give "
            "the tensor another name"
        )
    return old
