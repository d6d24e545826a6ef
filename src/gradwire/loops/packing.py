"""Packing: the buckets that tensors are copied into, and back from."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.averaging import Bucket
from gradwire.buckets import BucketLayout, Slot, dtype_name, row_by_row
from gradwire.loops.tensors import bucket_dtype
from gradwire.peers import SealedClaim
from gradwire.torch_private import copy_all_

# DDP's default: large enough that latency does not count, small enough that two overlap.
_BUCKET_BYTES = 25 << 20
# Lists that a loop may alternate between without packing them anew.
_NUM_KEPT = 64

_Signature = tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]


class Packing:
    """The buckets of one list of tensors.

    Buckets follow from names, shapes and dtypes alone, so that ranks whose strides differ pack alike. Values
    lie in them row by row.
    """

    def __init__(self, signature: _Signature) -> None:
        self.names = frozenset(name for name, *_ in signature)
        runs: list[list[tuple[Slot, torch.dtype, torch.device]]] = []
        # The bucket of each dtype and device that still takes tensors, and its bytes.
        unfilled: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
        for name, shape, dtype, device in signature:
            wide = bucket_dtype(dtype)
            number, filled = unfilled.get((wide, device), (-1, 0))
            num_bytes = shape.numel() * wide.itemsize
            if number < 0 or filled + num_bytes > _BUCKET_BYTES:
                number, filled = len(runs), 0
                runs.append([])
            runs[number].append((Slot(name, 0, shape, row_by_row(shape)), wide, device))
            unfilled[wide, device] = number, filled + num_bytes
        self.layouts = tuple(
            BucketLayout.packed(index, run[0][1], (slot for slot, _, _ in run))
            for index, run in enumerate(runs)
        )
        self._devices = [run[0][2] for run in runs]
        self._fields = {
            "call": "average_",
            "number of tensors": str(len(signature)),
            **{
                f"tensor {number}": f"{name!r}, shape {tuple(shape)}, {dtype_name(dtype)}"
                for number, (name, shape, dtype, _) in enumerate(signature)
            },
        }

    def claim(self, *, is_weighted: bool) -> SealedClaim:
        """Return the claim that ranks compare in a call with or without weights."""
        return self._weighted_claim if is_weighted else self._plain_claim

    def buckets(
        self, tensors: Mapping[str, Tensor], weight: float | None, *, may_overlap: bool
    ) -> Iterator[Bucket]:
        """Yield the buckets of a call, in order; ``weight`` and ``may_overlap`` as for `Bucket`."""
        claim = self.claim(is_weighted=weight is not None)
        flats = self.pack(tensors)
        for index, (layout, flat) in enumerate(zip(self.layouts, flats, strict=True)):
            yield Bucket(
                flat,
                layout,
                is_last=index == len(flats) - 1,
                weight=weight,
                # The first bucket stands for all; each bucket of a weighted mean needs the weights.
                claim=claim if index == 0 or weight is not None else None,
                may_overlap=may_overlap,
            )

    def pack(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values of each bucket; those of a contiguous tensor alone are no copy."""
        return [
            self._pack(layout, device, tensors)
            for layout, device in zip(self.layouts, self._devices, strict=True)
        ]

    def unpack(self, results: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Copy results back to their tensors, where they are not there already."""
        for layout, result in zip(self.layouts, results, strict=True):
            own = [tensors[slot.name].detach() for slot in layout.slots]
            if len(own) > 1 or not _is_flat(own[0], layout):
                _copy_all(own, [slot.view(result) for slot in layout.slots])

    @functools.cached_property
    def _plain_claim(self) -> SealedClaim:
        return SealedClaim({**self._fields, "weight": "not given"})

    @functools.cached_property
    def _weighted_claim(self) -> SealedClaim:
        return SealedClaim({**self._fields, "weight": "given"})

    def _pack(self, layout: BucketLayout, device: torch.device, tensors: Mapping[str, Tensor]) -> Tensor:
        own = [tensors[slot.name].detach() for slot in layout.slots]
        if len(own) == 1 and _is_flat(own[0], layout):
            return own[0].view(-1)
        flat = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        _copy_all([slot.view(flat) for slot in layout.slots], own)
        return flat


class Packings:
    """The packings of the lists that were averaged last, so that alternating lists are packed once."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Signature, Packing] = OrderedDict()
        self.last: Packing | None = None

    def of(self, tensors: Mapping[str, Tensor]) -> tuple[Packing, bool]:
        """Return the packing of these tensors, and True if it is new."""
        signature = tuple((name, t.shape, t.dtype, t.device) for name, t in tensors.items())
        packing = self._kept.get(signature)
        is_new = packing is None
        if packing is None:
            packing = self._kept[signature] = Packing(signature)
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(signature)
        self.last = packing
        return packing, is_new


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if any(each.is_conj() or each.is_neg() for each in targets):  # which copy_all_ cannot write to
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        copy_all_(targets, sources)


def _is_flat(tensor: Tensor, layout: BucketLayout) -> bool:
    """Return True if the tensor's own memory can be a bucket."""
    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return is_plain and tensor.dtype == layout.dtype
