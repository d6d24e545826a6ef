"""Matrix products for numba, in tiles that fit the processor's registers.

Each number of a product is one chain of fused multiply-adds, in order. So its bits depend neither on its
place in a matrix nor on the size of a tile. The product of a library such as torch may give other bits for
another alignment of memory or another number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from gradwire.ops.cpu.compiling import helper, subroutine
from gradwire.ops.cpu.lines import I8, LINE, fill, mark_past_caches, point
from gradwire.ops.cpu.scalars import INFINITY
from gradwire.ops.cpu.vectors import write_prefetch

_HAS_WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f"))
# Rows of a tile, and lines in a row. Its sums take 16 of the 32 registers of AVX-512. Without AVX-512, they
# take 8 of 16 registers, or on ARM 16 of 32 of half the size.
ROWS, NUM_LINES = (8, 2) if _HAS_WIDE_REGISTERS else (4, 1)
# The width of a tile in fp32 numbers, and in fp64 numbers.
PANEL = np.int64(NUM_LINES * LINE)
PANEL64 = np.int64(PANEL // 2)

# What to do with a product: write it, add it to what is there, subtract it, or write it past the caches, for
# which rows must be aligned to lines.
SET, ADD, SUBTRACT, STREAM = np.int64(0), np.int64(1), np.int64(-1), np.int64(2)


class Left(NamedTuple):
    """The left matrix of a product."""

    first: Any
    """Pointer to the first number, here and below. Strides count numbers."""
    row_stride: Any
    column_stride: Any


class Right(NamedTuple):
    """The right matrix of a product, its columns in panels as wide as a tile."""

    first: Any
    panel_stride: Any
    row_stride: Any


class Product(NamedTuple):
    """The destination of a product, its columns in panels too."""

    first: Any
    panel_stride: Any
    row_stride: Any
    mode: Any


class Ahead(NamedTuple):
    """Memory to prefetch during a product: each step of each tile fetches a cache line and goes on."""

    first: Any
    stride: Any


class Gradients(NamedTuple):
    """Gradients to add to their sums during a product: each step of each tile adds the next `ROWS`."""

    values: Any
    sums: Any
    largest: Any
    """Pointer to `ROWS` integers, the bits of the largest magnitudes so far."""


@helper
def no_prefetch(first: Any) -> Any:
    """Return an `Ahead` that prefetches the same line over and over."""
    return Ahead(first, I8(0))


Beside = Callable[[Any, Any], AbstractContextManager[Callable[[Any], None]]]
"""Something to do in each step of a tile, beside the product, which leaves most of the processor idle."""


@contextmanager
def _prefetching(builder: Any, ahead: Any) -> Iterator[Callable[[Any], None]]:
    first, stride = cgutils.unpack_tuple(builder, ahead)
    yield lambda index: write_prefetch(builder, builder.gep(first, [builder.mul(index, stride)]), 2)


# Numbers of which a line is prefetched before they are added: 2 KiB.
_LEAD = 512


@contextmanager
def _accumulating(builder: Any, gradients: Any) -> Iterator[Callable[[Any], None]]:
    """Add finite gradients, and note the bits of the largest magnitudes, as `few_vectors.accumulate` does."""
    values, sums, largest = cgutils.unpack_tuple(builder, gradients)
    numbers, bits = ir.VectorType(ir.FloatType(), ROWS), ir.VectorType(ir.IntType(32), ROWS)
    largest = builder.bitcast(largest, bits.as_pointer())
    top = cgutils.alloca_once_value(builder, builder.load(largest, align=4))

    def constant(number: int) -> Any:
        return ir.Constant(bits, [number] * ROWS)

    def add(index: Any) -> None:
        position = builder.mul(index, ir.Constant(ir.IntType(64), ROWS))
        places = [builder.gep(first, [position]) for first in (values, sums)]
        for place in places:
            write_prefetch(builder, builder.gep(place, [ir.Constant(ir.IntType(64), _LEAD)]), 3)
        source, target = (builder.bitcast(place, numbers.as_pointer()) for place in places)
        value = builder.load(source, align=4)
        magnitude = builder.and_(builder.bitcast(value, bits), constant(0x7FFFFFFF))
        before = builder.load(top)
        builder.store(builder.select(builder.icmp_signed(">", magnitude, before), magnitude, before), top)
        is_finite = builder.icmp_signed("<", magnitude, constant(INFINITY))
        finite = builder.select(is_finite, value, ir.Constant(numbers, None))
        builder.store(builder.fadd(builder.load(target, align=4), finite), target, align=4)

    yield add
    builder.store(builder.load(top), largest, align=4)


def _tile(num_rows: int, num_lines: int, width: int, beside: Beside = _prefetching) -> Any:
    """Return an intrinsic: the product of ``num_rows`` rows and ``num_lines * width`` columns."""

    @intrinsic
    def tile(typing_context: Any, a: Any, b: Any, depth: Any, out: Any, work: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (a, a_row, a_step), (b, _, b_step), (out, _, out_row, mode) = (
                cgutils.unpack_tuple(builder, args[i]) for i in (0, 1, 3)
            )
            depth = args[2]
            item, size = a.type.pointee, signature.args[0].types[0].dtype.bitwidth // 8
            kind = item if width == 1 else ir.VectorType(item, width)
            name = f"llvm.fmuladd.{'' if width == 1 else f'v{width}'}f{8 * size}"
            fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)

            def integer(number: int) -> Any:
                return ir.Constant(ir.IntType(64), number)

            def places(first: Any) -> list[Any]:
                """Return pointers to the lines of a row."""
                starts = [builder.gep(first, [integer(v * width)]) for v in range(num_lines)]
                return [builder.bitcast(start, kind.as_pointer()) for start in starts]

            zero = ir.Constant(kind, None)
            targets = [
                place
                for r in range(num_rows)
                for place in places(builder.gep(out, [builder.mul(out_row, integer(r))]))
            ]
            sums = [cgutils.alloca_once_value(builder, zero) for _ in targets]
            with builder.if_then(builder.icmp_signed("!=", mode, integer(int(STREAM)))):
                for target in targets:
                    write_prefetch(builder, target, 3)
            with beside(builder, args[4]) as do_beside, cgutils.for_range(builder, depth) as loop:
                do_beside(loop.index)
                column = builder.gep(a, [builder.mul(loop.index, a_step)])
                row = builder.gep(b, [builder.mul(loop.index, b_step)])
                lines = [builder.load(place, align=size) for place in places(row)]
                for r in range(num_rows):
                    factor = builder.load(builder.gep(column, [builder.mul(a_row, integer(r))]))
                    factor = factor if width == 1 else fill(builder, factor, width)
                    for line, total in zip(lines, sums[r * num_lines : (r + 1) * num_lines], strict=True):
                        builder.store(builder.call(fused, [factor, line, builder.load(total)]), total)
            modes: dict[np.int64, Callable[[Any, Any], Any]] = {
                SET: lambda before, total: total,
                ADD: builder.fadd,
                SUBTRACT: builder.fsub,
                STREAM: lambda before, total: total,
            }
            for case, combine in modes.items():
                streams = case == STREAM and width > 1
                with builder.if_then(builder.icmp_signed("==", mode, integer(int(case)))):
                    for target, total in zip(targets, sums, strict=True):
                        before = builder.load(target, align=size) if case in (ADD, SUBTRACT) else None
                        result = combine(before, builder.load(total))
                        stored = builder.store(result, target, align=size * (width if streams else 1))
                        if streams:
                            mark_past_caches(builder, stored)
            return context.get_dummy_value()

        return numba.void(a, b, I8, out, work), generate

    return tile


def _multiply(line: int) -> Any:
    """Return `multiply` for numbers of which a line holds ``line``."""
    panel = NUM_LINES * line
    full, narrow, thin = (_tile(ROWS, *size) for size in ((NUM_LINES, line), (1, line), (1, 1)))
    last_full, last_narrow, last_thin = (_tile(1, *size) for size in ((NUM_LINES, line), (1, line), (1, 1)))

    @helper
    def multiply(shape: Any, depth: Any, a: Any, b: Any, out: Any, ahead: Any) -> None:
        """Write, add or subtract the product ``a @ b``, of this shape, with sums of ``depth`` terms."""
        num_rows, num_columns = shape
        j = 0
        while j < num_columns:
            right = Right(
                point(b.first, j // panel * b.panel_stride + j % panel), b.panel_stride, b.row_stride
            )
            width = panel if num_columns - j >= panel else line if num_columns - j >= line else 1
            target_place = j // panel * out.panel_stride + j % panel
            i = 0
            while i < num_rows:
                left = Left(point(a.first, i * a.row_stride), a.row_stride, a.column_stride)
                place = point(out.first, i * out.row_stride + target_place)
                target = Product(place, out.panel_stride, out.row_stride, out.mode)
                if num_rows - i >= ROWS:
                    if width == panel:
                        full(left, right, depth, target, ahead)
                    elif width == line:
                        narrow(left, right, depth, target, ahead)
                    else:
                        thin(left, right, depth, target, ahead)
                    i += ROWS
                else:
                    if width == panel:
                        last_full(left, right, depth, target, ahead)
                    elif width == line:
                        last_narrow(left, right, depth, target, ahead)
                    else:
                        last_thin(left, right, depth, target, ahead)
                    i += 1
                ahead = Ahead(point(ahead.first, depth * ahead.stride), ahead.stride)
            j += width

    return multiply


multiply, multiply64 = _multiply(LINE), _multiply(LINE // 2)

_full_adding, _narrow_adding = (_tile(ROWS, num_lines, LINE, _accumulating) for num_lines in (NUM_LINES, 1))


@subroutine
def _multiply_panel_and_accumulate(
    num_columns: Any, depth: Any, a: Any, b: Any, out: Any, gradients: Any
) -> None:
    # A function of its own: among other code, LLVM kept addresses on the stack, which took 1.5 times as long.
    if num_columns < PANEL:
        _narrow_adding(a, b, depth, out, gradients)
    else:
        _full_adding(a, b, depth, out, gradients)


@helper
def multiply_and_accumulate(num_columns: Any, depth: Any, a: Any, b: Any, out: Any, gradients: Any) -> None:
    """Do what `multiply` does for `ROWS` rows of whole lines, and add ``ROWS * depth`` gradients."""
    _multiply_panel_and_accumulate(num_columns, depth, a, b, out, gradients)
    if num_columns > PANEL:
        multiply(
            (ROWS, num_columns - PANEL),
            depth,
            a,
            Right(point(b.first, b.panel_stride), b.panel_stride, b.row_stride),
            Product(point(out.first, out.panel_stride), out.panel_stride, out.row_stride, out.mode),
            no_prefetch(b.first),
        )
