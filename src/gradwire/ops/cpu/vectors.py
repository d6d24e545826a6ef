"""What numba lacks for runs of values: parts that cost nothing, reading ahead, writing past the caches."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from torch import Tensor

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import I8, LINE, address, load, store, stream

# What one store past the caches writes: a cache line of fp32.
LINE_BYTES = 64

# From so many values on, 8 MiB, what is decoded goes past the caches: what the last of them holds is
# better left in it, since DDP reads it next.
STREAMED = 1 << 21


def span(rows: Tensor) -> Tensor:
    """The memory of a matrix from its first row to the end of its last, with what lies between rows."""
    return rows.as_strided(((len(rows) - 1) * rows.stride(0) + rows.shape[1],), (1,))


@intrinsic
def part(typing_context: Any, array: Any, start: Any, length: Any) -> Any:
    """``length`` values of a longer array from ``start`` on, unchecked; the array must outlive them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type
        item = context.get_constant(numba.intp, kind.dtype.bitwidth // 8)
        view = context.make_array(kind)(context, builder)
        data = address(context, builder, signature.args[0], args[0], args[1])
        populate_array(view, data, [args[2]], [item], item, None)
        return view._getvalue()

    return array(array, I8, I8), generate


@intrinsic
def prefetch(typing_context: Any, run: Any, index: Any) -> Any:
    """Begin to read the cache line with this value, or nothing, if there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        place = builder.bitcast(address(context, builder, signature.args[0], *args), byte)
        # To read, into all caches, data.
        how = [ir.Constant(word, value) for value in (0, 3, 1)]
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [byte], function), [place, *how])
        return context.get_dummy_value()

    return numba.void(run, I8), generate


@intrinsic
def fence(typing_context: Any) -> Any:
    """Let other threads see what was written past the caches."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.void(), generate


def streams_to(values: Tensor) -> bool:
    """Whether fp32 values are so many that they are better written past the caches, and can be.

    A line that is written whole need not be read first: a third less traffic than an ordinary copy.
    """
    return values.numel() >= STREAMED and values.data_ptr() % LINE_BYTES == 0


@helper
def copy(source: Any, target: Any, length: Any) -> None:
    for i in range(length):
        target[i] = source[i]


@helper
def write(source: Any, target: Any, length: Any, streams: Any) -> None:
    """Copy, past the caches if that is wanted; ``target`` then begins at a multiple of a line."""
    num_whole = length // LINE * LINE
    if streams:
        for i in range(0, num_whole, LINE):
            stream(target, i, load(source, i))
    else:
        for i in range(0, num_whole, LINE):
            store(target, i, load(source, i))
    for i in range(num_whole, length):
        target[i] = source[i]
