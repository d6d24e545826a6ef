"""Which parameter lies where in a flat bucket, and state that follows parameters between buckets."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

# Wrappers put these into the names of what they wrap; the parameter itself is the same.
_WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_name(name: str) -> str:
    """The name a parameter has in the unwrapped model.

    >>> canonical_name("_orig_mod.blocks.0._checkpoint_wrapped_module.fc.weight")
    'blocks.0.fc.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket."""

    name: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's values in ``flat``, shaped and strided as the parameter is."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of one bucket, in the order in which they lie in it."""

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]

    @classmethod
    def packed(cls, index: int, dtype: torch.dtype, slots: Iterable[Slot]) -> BucketLayout:
        """These parameters one after the other, wherever they lay before."""
        moved, offset = [], 0
        for slot in slots:
            moved.append(replace(slot, offset=offset))
            offset += slot.numel
        return cls(index, dtype, tuple(moved))

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def real_values(self) -> tuple[int, torch.dtype]:
        """How many values the bucket has by `as_real`, and of which dtype."""
        if self.dtype.is_complex:
            return 2 * self.numel, self.dtype.to_real()
        return self.numel, self.dtype

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter's values in ``flat``, by name."""
        return {slot.name: slot.view(flat) for slot in self.slots}


class Layouts:
    """The layout of each bucket a model's reducer hands out, remade when the reducer rebuilds them."""

    def __init__(self, module: nn.Module | None = None) -> None:
        """Take names from ``module``; without one, parameters are named as they are first seen."""
        self._names: dict[int, str] = {}
        self.are_named = module is not None
        """Whether a parameter has the same name on every rank, whatever was seen there before."""
        if module is not None:
            # A shared parameter has several names; the first is its name, as in state_dict().
            for name, parameter in module.named_parameters():
                self._names[id(parameter)] = canonical_name(name)
        self._layouts: dict[int, tuple[tuple[int, ...], BucketLayout]] = {}

    def of(self, bucket: GradBucket) -> BucketLayout:
        """The layout of ``bucket``."""
        index, parameters = bucket.index(), bucket.parameters()
        if bucket.is_last():
            for stale in [other for other in self._layouts if other > index]:
                del self._layouts[stale]
        identity = tuple(map(id, parameters))
        known = self._layouts.get(index)
        if known is not None and known[0] == identity:
            return known[1]
        dtype = bucket.buffer().dtype
        layout = self.make(index, dtype, parameters)
        self._layouts[index] = identity, layout
        return layout

    def make(self, index: int, dtype: torch.dtype, parameters: Sequence[Tensor]) -> BucketLayout:
        """Return the layout of a bucket that holds ``parameters`` one after the other, in ``dtype``."""
        return BucketLayout.packed(index, dtype, self._slots(parameters, as_real=not dtype.is_complex))

    def current(self) -> tuple[BucketLayout, ...]:
        """The layouts of the buckets of the most recent step, in bucket order."""
        return tuple(layout for _, (_, layout) in sorted(self._layouts.items()))

    def guess(self, parameters: list[Tensor]) -> tuple[BucketLayout, ...]:
        """One bucket for each dtype, for want of what DDP has not told yet."""
        dtypes = dict.fromkeys(map(_real, parameters))
        return tuple(
            BucketLayout.packed(
                index, dtype, self._slots([p for p in parameters if _real(p) == dtype], as_real=True)
            )
            for index, dtype in enumerate(dtypes)
        )

    def _slots(self, parameters: Sequence[Tensor], *, as_real: bool) -> Iterator[Slot]:
        """With ``as_real``, complex parameters have a last dimension of two, as DDP hands them out."""
        for parameter in parameters:
            shape, stride = parameter.shape, _bucket_stride(parameter)
            if as_real and parameter.is_complex():
                shape, stride = torch.Size([*shape, 2]), (*(2 * step for step in stride), 1)
            yield Slot(self._name(parameter), 0, shape, stride)

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            if self.are_named:
                raise ValueError(
                    f"a bucket holds a parameter of shape {tuple(parameter.shape)} that the model had "
                    "not when gradwire was attached; attach again after changing a model's parameters"
                )
            self._names[id(parameter)] = f"parameter{len(self._names)}"
        return self._names[id(parameter)]


def as_real(flat: Tensor) -> Tensor:
    """The same values, those of a complex bucket as the pairs that travel."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _real(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient in a bucket."""
    return parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype


def _bucket_stride(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a parameter's gradient inside a bucket.

    DDP keeps the parameter's own order in memory (channels_last, transposed) when it is dense, and lays
    it out row by row otherwise.
    """
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return parameter.stride()


class NamedState:
    """One flat tensor per bucket whose values belong to parameters, whatever bucket they lie in.

    When the reducer rebuilds its buckets, each parameter's values move with it; a parameter that has
    none yet starts at zero. Values are kept in the parameter's own order in memory.

    >>> a = BucketLayout(0, torch.float32, (Slot("w", 0, torch.Size([2]), (1,)),))
    >>> b = BucketLayout(0, torch.float32, (Slot("v", 0, torch.Size([1]), (1,)),
    ...                                     Slot("w", 1, torch.Size([2]), (1,))))
    >>> state = NamedState()
    >>> state.flat(a).copy_(torch.tensor([3.0, 4.0]))
    tensor([3., 4.])
    >>> state.flat(b)
    tensor([0., 3., 4.])
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._holders: dict[str, _Holder] = {}

    def flat(
        self, layout: BucketLayout, device: torch.device | str = "cpu", *, may_change: bool = False
    ) -> Tensor:
        """The state of a bucket's parameters, as one flat tensor that the caller may write to.

        What had another shape before is an error, or, if it ``may_change``, starts at zero again.
        """
        holder = self._holders.get(layout.slots[0].name)
        if (
            holder is not None
            and holder.layout == layout
            and all(self._holders.get(slot.name) is holder for slot in layout.slots)
        ):
            return holder.flat
        new = _Holder(layout, torch.zeros(layout.numel, dtype=self._dtype, device=device))
        for slot in layout.slots:
            holder = self._holders.get(slot.name)
            if holder is not None and not (may_change and holder.view(slot.name).shape != slot.shape):
                new.view(slot.name).copy_(_same_shape(slot, holder.view(slot.name)))
        # A holder that no parameter points to any more is freed here.
        self._holders.update((slot.name, new) for slot in layout.slots)
        return new.flat

    def put(self, name: str, value: Tensor) -> None:
        """Give a parameter the state ``value``, a copy of it, whatever bucket it will lie in."""
        flat = value.detach().to(self._dtype).contiguous().flatten().clone()
        slot = Slot(name, 0, value.shape, torch.empty(value.shape, device="meta").stride())
        self._holders[name] = _Holder(BucketLayout(-1, self._dtype, (slot,)), flat)

    def drop(self, layout: BucketLayout) -> None:
        """Forget the state of a bucket's parameters."""
        for slot in layout.slots:
            self._holders.pop(slot.name, None)

    def has(self, layout: BucketLayout) -> bool:
        """Whether any of a bucket's parameters has a state."""
        return any(slot.name in self._holders for slot in layout.slots)

    def flats(self) -> list[Tensor]:
        """Every flat tensor, once; it may also hold values of parameters that have moved elsewhere."""
        return list({id(holder): holder.flat for holder in self._holders.values()}.values())

    def named(self) -> dict[str, Tensor]:
        """Every parameter's state, by name, as views."""
        return {name: holder.view(name) for name, holder in self._holders.items()}


@dataclass(frozen=True)
class _Holder:
    layout: BucketLayout
    flat: Tensor

    @functools.cached_property
    def _slots(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.layout.slots}

    def view(self, name: str) -> Tensor:
        return self._slots[name].view(self.flat)


def _same_shape(slot: Slot, old: Tensor) -> Tensor:
    if old.shape != slot.shape:
        raise ValueError(
            f"parameter {slot.name} had shape {tuple(old.shape)} and now has {tuple(slot.shape)}: "
            "its state cannot be carried over"
        )
    return old
