"""Matrix products for numba, in tiles that fit the processor's registers.

Each number of a product is one chain of fused multiply-adds, in order. So its bits depend neither on its
place in a matrix nor on the size of a tile. The product of a library such as torch may give other bits for
another alignment of memory or another number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import I8, LINE, fill, point
from gradwire.ops.cpu.vectors import write_prefetch

_HAS_WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f"))
# Rows of a tile, and lines in a row. Its sums take 16 of the 32 registers of AVX-512. Without AVX-512, they
# take 8 of 16 registers, or on ARM 16 of 32 of half the size.
ROWS, NUM_LINES = (8, 2) if _HAS_WIDE_REGISTERS else (4, 1)
# The width of a tile in fp32 numbers, and in fp64 numbers.
PANEL = np.int64(NUM_LINES * LINE)
PANEL64 = np.int64(PANEL // 2)

# What to do with a product: write it, add it to what is there, or subtract it.
SET, ADD, SUBTRACT = np.int64(0), np.int64(1), np.int64(-1)


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
    """The destination of a product, with rows of adjacent numbers."""

    first: Any
    row_stride: Any
    mode: Any


class Ahead(NamedTuple):
    """Memory to prefetch during a product: one cache line per step of a tile."""

    first: Any
    row_stride: Any
    """Distance for each row of the product."""
    column_stride: Any
    step_stride: Any


@helper
def no_prefetch(first: Any) -> Any:
    """Return an `Ahead` that prefetches the same line over and over."""
    return Ahead(first, I8(0), I8(0), I8(0))


def _tile(num_rows: int, num_lines: int, width: int) -> Any:
    """Return an intrinsic: the product of ``num_rows`` rows and ``num_lines * width`` columns."""

    @intrinsic
    def tile(typing_context: Any, a: Any, b: Any, depth: Any, out: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (a, a_row, a_step), (b, _, b_step), (out, out_row, mode), (ahead, _, _, ahead_step) = (
                cgutils.unpack_tuple(builder, args[i]) for i in (0, 1, 3, 4)
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
            for target in targets:
                write_prefetch(builder, target, 3)
            with cgutils.for_range(builder, depth) as loop:
                write_prefetch(builder, builder.gep(ahead, [builder.mul(loop.index, ahead_step)]), 2)
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
            }
            for case, combine in modes.items():
                with builder.if_then(builder.icmp_signed("==", mode, integer(int(case)))):
                    for target, total in zip(targets, sums, strict=True):
                        before = None if case == SET else builder.load(target, align=size)
                        builder.store(combine(before, builder.load(total)), target, align=size)
            return context.get_dummy_value()

        return numba.void(a, b, I8, out, ahead), generate

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
            i = 0
            while i < num_rows:
                left = Left(point(a.first, i * a.row_stride), a.row_stride, a.column_stride)
                target = Product(point(out.first, i * out.row_stride + j), out.row_stride, out.mode)
                next_line = point(ahead.first, i * ahead.row_stride + j * ahead.column_stride)
                coming = Ahead(next_line, ahead.row_stride, ahead.column_stride, ahead.step_stride)
                if num_rows - i >= ROWS:
                    if width == panel:
                        full(left, right, depth, target, coming)
                    elif width == line:
                        narrow(left, right, depth, target, coming)
                    else:
                        thin(left, right, depth, target, coming)
                    i += ROWS
                else:
                    if width == panel:
                        last_full(left, right, depth, target, coming)
                    elif width == line:
                        last_narrow(left, right, depth, target, coming)
                    else:
                        last_thin(left, right, depth, target, coming)
                    i += 1
            j += width

    return multiply


multiply, multiply64 = _multiply(LINE), _multiply(LINE // 2)
