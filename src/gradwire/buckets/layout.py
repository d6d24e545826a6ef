"""Layouts of flat buckets: which parameter lies where."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

# Wrappers insert these into parameters' names; the parameters themselves are the same.
_WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_name(name: str) -> str:
    """Return the name that a parameter has in the unwrapped model.

    >>> canonical_name("_orig_mod.blocks.0._checkpoint_wrapped_module.fc.weight")
    'blocks.0.fc.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {canonical_name(name): p for name, p in module.named_parameters() if p.requires_grad}


def row_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of values that lie row by row.

    >>> row_by_row((2, 3, 4)), row_by_row(())
    ((12, 4, 1), ())
    """
    return torch.empty(tuple(shape), device="meta").stride()


def shard_shape(shape: Sequence[int], dim: int, num_shards: int) -> tuple[int, ...]:
    """Return the shape of every shard of a parameter: the last ones end with padding.

    >>> shard_shape((17, 3), 0, 4), shard_shape((17, 3), 0, 1)
    ((5, 3), (17, 3))
    """
    if num_shards == 1:
        return tuple(shape)
    return (*shape[:dim], -(-shape[dim] // num_shards), *shape[dim + 1 :])


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket."""

    name: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    whole_shape: torch.Size | None = None
    """The shape of the parameter, if this is a shard of it or has padding; None if it is all of it."""

    @property
    def parameter_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.shape if self.whole_shape is None else self.whole_shape

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """Return this parameter's values in ``flat``, with the parameter's shape and strides."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of one bucket, in the order in which they lie in it."""

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    num_shards: int = 1
    """The number of equal parts of every parameter; part 0 of all parameters comes first, then part 1."""

    @classmethod
    def packed(
        cls, index: int, dtype: torch.dtype, slots: Iterable[Slot], num_shards: int = 1
    ) -> BucketLayout:
        """Lay out these parameters one after the other, whatever offsets their slots have."""
        moved, offset = [], 0
        for slot in slots:
            moved.append(replace(slot, offset=offset))
            offset += slot.numel
        return cls(index, dtype, tuple(moved), num_shards)

    def shard(self) -> BucketLayout:
        """Return the layout of one part of every parameter."""
        slots = (
            replace(slot, shape=torch.Size([slot.shape[0] // self.num_shards, *slot.shape[1:]]))
            for slot in self.slots
        )
        return BucketLayout.packed(self.index, self.dtype, self.slots if self.num_shards == 1 else slots)

    @functools.cached_property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def real_values(self) -> tuple[int, torch.dtype]:
        """The number and the dtype of the bucket's values after `as_real`."""
        if self.dtype.is_complex:
            return 2 * self.numel, self.dtype.to_real()
        return self.numel, self.dtype

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return every parameter's values in ``flat``, by name."""
        return {slot.name: slot.view(flat) for slot in self.slots}


class Layouts:
    """The layout of each bucket that a model's reducer hands out; made again when it rebuilds them."""

    def __init__(self, module: nn.Module | None = None) -> None:
        """Take names from ``module``; without one, number parameters in the order they are first seen."""
        self._names: dict[int, str] = {}
        self._has_module = module is not None
        if module is not None:
            # A shared parameter has several names; the first is its name, as in state_dict().
            for name, parameter in module.named_parameters():
                self._names[id(parameter)] = canonical_name(name)
        self._layouts: dict[int, tuple[tuple[int, ...], BucketLayout]] = {}

    def of(
        self, index: int, dtype: torch.dtype, parameters: Sequence[Tensor], *, is_last: bool
    ) -> BucketLayout:
        """Return the layout of a bucket of the current step, and remember it.

        Raises ValueError if the bucket holds a parameter that is not in the module.
        """
        if is_last:
            for stale in [other for other in self._layouts if other > index]:
                del self._layouts[stale]
        identity = tuple(map(id, parameters))
        known = self._layouts.get(index)
        if known is not None and known[0] == identity:
            return known[1]
        layout = self.make(index, dtype, parameters)
        self._layouts[index] = identity, layout
        return layout

    def make(self, index: int, dtype: torch.dtype, parameters: Sequence[Tensor]) -> BucketLayout:
        """Return the layout of a bucket that holds ``parameters`` one after the other, in ``dtype``."""
        slots = self._slots(parameters, complex_as_pairs=not dtype.is_complex)
        return BucketLayout.packed(index, dtype, slots)

    def current(self) -> tuple[BucketLayout, ...]:
        """Return the layouts of the most recent step, in bucket order."""
        return tuple(layout for _, (_, layout) in sorted(self._layouts.items()))

    def one_per_dtype(self, parameters: list[Tensor]) -> tuple[BucketLayout, ...]:
        """Return one bucket for each dtype; a stand-in before DDP has handed out its own buckets."""
        dtypes = dict.fromkeys(map(_gradient_dtype, parameters))
        return tuple(
            self.make(index, dtype, [p for p in parameters if _gradient_dtype(p) == dtype])
            for index, dtype in enumerate(dtypes)
        )

    def _slots(self, parameters: Sequence[Tensor], *, complex_as_pairs: bool) -> Iterator[Slot]:
        """Yield a slot for each parameter, at offset 0.

        With ``complex_as_pairs``, complex parameters have a last dimension of two, as DDP hands them out.
        """
        for parameter in parameters:
            shape, stride = parameter.shape, _bucket_stride(parameter)
            if complex_as_pairs and parameter.is_complex():
                shape, stride = torch.Size([*shape, 2]), (*(2 * step for step in stride), 1)
            yield Slot(self._name(parameter), 0, shape, stride)

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            if self._has_module:
                raise ValueError(
                    f"a bucket holds a parameter of shape {tuple(parameter.shape)} that the model did not "
                    "have when gradwire was attached; attach again after changing a model's parameters"
                )
            self._names[id(parameter)] = f"parameter{len(self._names)}"
        return self._names[id(parameter)]


def as_real(flat: Tensor) -> Tensor:
    """Return a flat view of real values: complex ones become real and imaginary parts, interleaved."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient in DDP's buckets."""
    return parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype


def _bucket_stride(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient inside a bucket.

    DDP keeps the parameter's own order in memory (channels_last, transposed) if it is dense. Otherwise it
    lays the gradient out row by row.
    """
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return row_by_row(parameter.shape)
        expected *= size
    return parameter.stride()
