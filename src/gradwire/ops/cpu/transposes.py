"""Transposes of fp32 matrices in numba, in blocks of 16 lines that stay in registers."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import I8, LINE, point


@intrinsic
def _transpose_block(typing_context: Any, source: Any, stride: Any, target: Any, target_stride: Any) -> Any:
    """Transpose 16 rows of 16 numbers, between pointers; strides are those of rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, stride, target, target_stride = args
        kind = ir.VectorType(ir.FloatType(), LINE)

        def row(first: Any, distance: Any, number: int) -> Any:
            place = builder.gep(first, [builder.mul(distance, ir.Constant(ir.IntType(64), number))])
            return builder.bitcast(place, kind.as_pointer())

        lines = [builder.load(row(source, stride, r), align=4) for r in range(LINE)]
        half = LINE // 2
        masks = [
            ir.Constant(
                ir.VectorType(ir.IntType(32), LINE), [k for j in range(half) for k in (i + j, i + j + LINE)]
            )
            for i in (0, half)
        ]
        # Each turn interleaves the first half of the lines with the second: one bit of a number's row and of
        # its column change places.
        for _ in range(LINE.bit_length() - 1):
            pairs = zip(lines[:half], lines[half:], strict=True)
            lines = [builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in masks]
        for r, line in enumerate(lines):
            builder.store(line, row(target, target_stride, r), align=4)
        return context.get_dummy_value()

    return numba.void(source, I8, target, I8), generate


@helper
def transpose(source: Any, stride: Any, shape: Any, target: Any, target_stride: Any) -> None:
    """Write the transpose of a matrix of this shape; strides are those of rows.

    ``source`` and ``target`` are pointers or flat arrays.
    """
    num_rows, num_columns = shape
    for i in range(0, num_rows, LINE):
        for j in range(0, num_columns, LINE):
            if i + LINE <= num_rows and j + LINE <= num_columns:
                block, to = point(source, i * stride + j), point(target, j * target_stride + i)
                _transpose_block(block, stride, to, target_stride)
            else:
                for k in range(i, min(i + LINE, num_rows)):
                    for h in range(j, min(j + LINE, num_columns)):
                        target[h * target_stride + k] = source[k * stride + h]
