"""The all-gather of a unit's parameters, as they are or by an encoding, in place of torch's own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.codecs import Codec, Raw
from gradwire.exchanges import Gathered, Scratch, aligned, aligned_rows
from gradwire.ops import Chunk
from gradwire.peers import Group, SealedClaim, all_gather_single, gather_by_nodes, require_same
from gradwire.recipes import Recipe, gathered
from gradwire.sharded.gathers import Gathers
from gradwire.sharded.units import Unit

# With fewer bits, weights are too far from those that the optimizer steps.
_ENCODINGS = ("fp32", "fp16", "bf16", "int8", "fp8", "int4")


def weights_codec(recipe: Recipe) -> Codec:
    """Return the encoding of parameters; ValueError for a recipe that is not one of values, or is random."""
    exchange = gathered(recipe).exchange if recipe.name.partition(":")[0] in _ENCODINGS else None
    if not isinstance(exchange, Gathered) or exchange.codec.stochastic:
        raise ValueError(
            f"weights={str(recipe)!r} cannot encode parameters: take one of {', '.join(_ENCODINGS)}, with "
            "rounding to the nearest"
        )
    return exchange.codec


@dataclass(frozen=True)
class Segment:
    """A matrix, or neighbouring vectors, in a shard: the places of their values and of their bytes."""

    codec: Codec
    values: slice
    bytes: slice


def segments_of(shapes: Sequence[torch.Size], dtype: torch.dtype, codec: Codec) -> list[Segment]:
    """Return the segments of a row in which a rank sends its shards, which have these shapes.

    Each matrix is encoded by itself: parameters differ in size, and a block has one scale. Vectors, which are
    norms and biases, are few, matter much, and stay as they are.
    """
    segments, start, begin = [], 0, 0
    for number, group in groupby(enumerate(shapes), _number_if_matrix):
        own = Raw(dtype) if number is None else codec.resolve(dtype)
        end = start + sum(shape.numel() for _, shape in group)
        if end == start:
            continue  # an empty matrix
        num_bytes = own.wire_bytes(end - start)
        segments.append(Segment(own, slice(start, end), slice(begin, begin + num_bytes)))
        start, begin = end, aligned(begin + num_bytes)
    return segments or [Segment(Raw(dtype), slice(0, 0), slice(0, 0))]


def _number_if_matrix(numbered: tuple[int, torch.Size]) -> int | None:
    number, shape = numbered
    return number if len(shape) > 1 else None


def goes_as_it_is(codec: Codec, dtype: torch.dtype) -> bool:
    """Return True if an encoding leaves values of this dtype as they are in memory."""
    return codec.resolve(dtype).in_place


def row_bytes(shapes: Sequence[torch.Size], dtype: torch.dtype, codec: Codec) -> int:
    """Return the bytes that a rank sends to each other one in an all-gather of its shards."""
    if goes_as_it_is(codec, dtype):
        return sum(shape.numel() for shape in shapes) * dtype.itemsize
    return aligned(segments_of(shapes, dtype, codec)[-1].bytes.stop)


def gather_bytes(unit: Unit, codec: Codec | None) -> int:
    """Return the bytes that a rank sends to each other one when a unit is gathered; None is torch's own."""
    shapes = [each.padded_shape for each in unit.parameters]
    return row_bytes(shapes, unit.gather_dtype, codec or Raw())


class UnitAllGather:
    """An argument of ``set_custom_all_gather``: it sends the parameters of one unit by an encoding.

    Each rank decodes all shards, its own too. So all ranks compute with the same weights, and a second
    all-gather in the backward pass has those of the forward pass. Optimizers step the shards themselves,
    which are not rounded.
    """

    def __init__(self, unit: Unit, codec: Codec, gathers: Gathers | None) -> None:
        """Gather on a lane, if ``gathers`` has one; otherwise in the order of the current stream."""
        self._unit = unit
        self._codec = codec
        self._gathers = gathers
        self._ways: dict[torch.dtype, tuple[list[Segment], SealedClaim]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the values that torch hands over, or takes back."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Leave what all ranks' shards decode to in ``output_tensor``, rank by rank."""
        shapes = [each.padded_shape for each in self._unit.parameters]
        is_whole = input_tensor.numel() == sum(shape.numel() for shape in shapes)
        # Shards of a smaller mesh are parts of decoded weights already, and bytes are of several dtypes.
        if not (is_whole and input_tensor.is_floating_point()):
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        segments, claim = self._way(input_tensor.dtype, shapes)
        if self._gathers is not None:
            run = functools.partial(_run_on_lane, claim, segments, self._gathers.node_size)
            return self._gathers.start(self._unit, output_tensor, run)
        if not segments:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        stride = aligned(segments[-1].bytes.stop)
        rows = torch.empty(group.size(), stride, dtype=torch.uint8, device=input_tensor.device)
        with _encoded(output_tensor, segments, rows, group.rank()):
            all_gather_single(rows.view(-1), rows[group.rank()], group=group)
        return None

    def _way(self, dtype: torch.dtype, shapes: Sequence[torch.Size]) -> tuple[list[Segment], SealedClaim]:
        """Return the segments of a row, none for values that go as they are, and what ranks compare."""
        if dtype not in self._ways:
            is_exact = goes_as_it_is(self._codec, dtype)
            segments = [] if is_exact else segments_of(shapes, dtype, self._codec)
            self._ways[dtype] = segments, SealedClaim({"gathered": f"{self._unit.name!r}, {dtype}"})
        return self._ways[dtype]


def _run_on_lane(
    claim: SealedClaim,
    segments: Sequence[Segment],
    node_size: int,
    flats: Sequence[Tensor],
    group: Group,
    scratch: Scratch,
) -> Sequence[Tensor]:
    """Gather the values of a unit in place; ValueError if another rank gathers another unit."""
    (flat,) = flats
    require_same(claim, group, flat.device)
    if not segments:
        gather_by_nodes(flat.view(torch.uint8).view(group.size, -1).unbind(), group, node_size)
        return flats
    rows = aligned_rows(scratch, "rows", group.size, segments[-1].bytes.stop, flat.device)
    with _encoded(flat, segments, rows, group.rank):
        gather_by_nodes(rows.unbind(), group, node_size)
    return flats


@contextlib.contextmanager
def _encoded(flat: Tensor, segments: Sequence[Segment], rows: Tensor, rank: int) -> Iterator[None]:
    """Encode this rank's values into its row; decode all rows when the block has gathered them."""
    parts = flat.view(len(rows), -1)
    for each in segments:
        _encode(each, parts[rank], rows[rank])
    yield
    for row, values in zip(rows, parts, strict=True):
        for each in segments:
            _decode(each, row, values)


def _encode(segment: Segment, values: Tensor, row: Tensor) -> None:
    part, codec = values[segment.values], segment.codec
    if not _takes(codec, part):
        part = part.to(codec.works_in)
    codec.encode(Chunk(part, row[segment.bytes]))


def _decode(segment: Segment, row: Tensor, values: Tensor) -> None:
    part, codec = values[segment.values], segment.codec
    if _takes(codec, part):
        codec.decode(row[segment.bytes], part)
    else:
        wide = torch.empty_like(part, dtype=codec.works_in)
        codec.decode(row[segment.bytes], wide)
        part.copy_(wide)


def _takes(codec: Codec, values: Tensor) -> bool:
    return codec.works_in in (None, values.dtype)
