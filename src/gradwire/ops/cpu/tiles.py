"""Products of matrices, for numba, in tiles that fit the processor's registers.

Each number of a product is one chain of fused multiplications and additions, in order: its bits depend
neither on where in a matrix it lies nor on the size of a tile. A library's product, such as torch's, may give
others for other alignments of memory, or another number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import I8, LINE, point

_HAS_WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f"))
# Sums in registers: 16 of 32 with AVX-512; without, 8 of 16, or 16 of the 32 of half that size which ARM has.
ROWS, NUM_LINES = (8, 2) if _HAS_WIDE_REGISTERS else (4, 1)
# How many numbers of fp32 a tile is wide, and of fp64.
PANEL = np.int64(NUM_LINES * LINE)
PANEL64 = np.int64(PANEL // 2)

# What becomes of a product.
SET, ADD, TAKE = np.int64(0), np.int64(1), np.int64(-1)
# Where nothing is fetched.
NOWHERE = (np.int64(0), np.int64(0), np.int64(0))


def _prefetch(builder: Any, place: Any, locality: int) -> None:
    """Begin to read a cache line: with 3 into all caches, with 2 into the second. It may be no one's."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    how = [ir.Constant(word, value) for value in (0, locality, 1)]
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
    builder.call(fetch, [builder.bitcast(place, byte), *how])


def _tile(num_rows: int, num_lines: int, width: int) -> Any:
    """The product of ``num_rows`` rows with ``num_lines`` times ``width`` columns, its sums in registers."""

    @intrinsic
    def tile(
        typing_context: Any,
        a: Any,
        a_row: Any,
        a_step: Any,
        b: Any,
        b_step: Any,
        depth: Any,
        out: Any,
        out_row: Any,
        how: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, a_row, a_step, b, b_step, depth, out, out_row, how, ahead, ahead_step = args
            item, size = a.type.pointee, signature.args[0].dtype.bitwidth // 8
            kind = item if width == 1 else ir.VectorType(item, width)
            name = f"llvm.fmuladd.{'' if width == 1 else f'v{width}'}f{8 * size}"
            fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)

            def whole(number: int) -> Any:
                return ir.Constant(ir.IntType(64), number)

            def places(first: Any) -> list[Any]:
                """Of the lines of a row."""
                starts = [builder.gep(first, [whole(v * width)]) for v in range(num_lines)]
                return [builder.bitcast(start, kind.as_pointer()) for start in starts]

            def spread(number: Any) -> Any:
                if width == 1:
                    return number
                empty = ir.Constant(kind, ir.Undefined)
                first = builder.insert_element(empty, number, ir.Constant(ir.IntType(32), 0))
                mask = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
                return builder.shuffle_vector(first, empty, mask)

            zero = ir.Constant(kind, None)
            targets = [
                place
                for r in range(num_rows)
                for place in places(builder.gep(out, [builder.mul(out_row, whole(r))]))
            ]
            sums = [cgutils.alloca_once_value(builder, zero) for _ in targets]
            for target in targets:
                _prefetch(builder, target, 3)
            with cgutils.for_range(builder, depth) as loop:
                _prefetch(builder, builder.gep(ahead, [builder.mul(loop.index, ahead_step)]), 2)
                column = builder.gep(a, [builder.mul(loop.index, a_step)])
                row = builder.gep(b, [builder.mul(loop.index, b_step)])
                lines = [builder.load(place, align=size) for place in places(row)]
                for r in range(num_rows):
                    factor = spread(builder.load(builder.gep(column, [builder.mul(a_row, whole(r))])))
                    for line, total in zip(lines, sums[r * num_lines : (r + 1) * num_lines], strict=True):
                        builder.store(builder.call(fused, [factor, line, builder.load(total)]), total)
            ways: dict[np.int64, Callable[[Any, Any], Any]] = {
                SET: lambda before, total: total,
                ADD: builder.fadd,
                TAKE: builder.fsub,
            }
            for way, combine in ways.items():
                with builder.if_then(builder.icmp_signed("==", how, whole(int(way)))):
                    for target, total in zip(targets, sums, strict=True):
                        before = None if way == SET else builder.load(target, align=size)
                        builder.store(combine(before, builder.load(total)), target, align=size)
            return context.get_dummy_value()

        return numba.void(a, I8, I8, b, I8, I8, out, I8, I8, ahead, I8), generate

    return tile


def _multiply(line: int) -> Any:
    """`multiply` for numbers of which a line is so long."""
    panel = NUM_LINES * line
    full, narrow, thin = (_tile(ROWS, *size) for size in ((NUM_LINES, line), (1, line), (1, 1)))
    last_full, last_narrow, last_thin = (_tile(1, *size) for size in ((NUM_LINES, line), (1, line), (1, 1)))

    @helper
    def multiply(
        shape: Any,
        depth: Any,
        a: Any,
        a_strides: Any,
        b: Any,
        b_strides: Any,
        out: Any,
        out_row: Any,
        how: Any,
        ahead: Any,
        ahead_strides: Any,
    ) -> None:
        """``out = a @ b``, or added to it, or taken from it; all are pointers to the first number.

        ``a`` has strides from row to row and from column to column, ``b`` from panel to panel (its columns in
        pieces as wide as a tile) and from row to row. Meanwhile each step of a tile fetches a line from
        ``ahead`` on, with strides by row, column and step.
        """
        num_rows, num_columns = shape
        a_row, a_step = a_strides
        b_panel, b_step = b_strides
        ahead_row, ahead_column, ahead_step = ahead_strides
        j = 0
        while j < num_columns:
            right = point(b, j // panel * b_panel + j % panel)
            width = panel if num_columns - j >= panel else line if num_columns - j >= line else 1
            i = 0
            while i < num_rows:
                left, to = point(a, i * a_row), point(out, i * out_row + j)
                coming = point(ahead, i * ahead_row + j * ahead_column)
                given = left, a_row, a_step, right, b_step, depth, to, out_row, how, coming, ahead_step
                if num_rows - i >= ROWS:
                    if width == panel:
                        full(*given)
                    elif width == line:
                        narrow(*given)
                    else:
                        thin(*given)
                    i += ROWS
                else:
                    if width == panel:
                        last_full(*given)
                    elif width == line:
                        last_narrow(*given)
                    else:
                        last_thin(*given)
                    i += 1
            j += width

    return multiply


multiply, multiply64 = _multiply(LINE), _multiply(LINE // 2)
