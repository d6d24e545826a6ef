"""Memory access that numba lacks: views without a cost, prefetches, stores past the caches."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from torch import Tensor

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.lines import I8, LINE, address, load, store, stream

# Bytes that one store past the caches writes: a line of fp32.
LINE_BYTES = 64

# From this number of values on, 8 MiB, results are written past the caches: the last-level cache then keeps
# what DDP reads next.
STREAMED = 1 << 21


def span(rows: Tensor) -> Tensor:
    """Return the memory of a matrix from its first row to the end of its last, gaps included."""
    return rows.as_strided(((len(rows) - 1) * rows.stride(0) + rows.shape[1],), (1,))


@helper
def aligned(numel: Any, dtype: Any) -> Any:
    """Return memory for this many numbers, undefined, that begins with a cache line."""
    memory = np.empty(numel + LINE_BYTES // 4, dtype)
    start = -memory.ctypes.data % LINE_BYTES // memory.itemsize
    return memory[start : start + numel]


@intrinsic
def part(typing_context: Any, array: Any, start: Any, length: Any) -> Any:
    """Return a view of ``length`` values from ``start`` on, unchecked; the array must outlive it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type
        item = context.get_constant(numba.intp, kind.dtype.bitwidth // 8)
        view = context.make_array(kind)(context, builder)
        data = address(context, builder, signature.args[0], args[0], args[1])
        populate_array(view, data, [args[2]], [item], item, None)
        return view._getvalue()

    return array(array, I8, I8), generate


def write_prefetch(builder: Any, place: Any, locality: int) -> None:
    """Write LLVM's prefetch of a cache line: into all caches with locality 3, from the second on with 2.

    The address need not be valid.
    """
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    # Read access, then locality, then the data cache.
    options = [ir.Constant(word, value) for value in (0, locality, 1)]
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
    builder.call(fetch, [builder.bitcast(place, byte), *options])


@intrinsic
def prefetch(typing_context: Any, run: Any, index: Any) -> Any:
    """Prefetch the cache line of this value, which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write_prefetch(builder, address(context, builder, signature.args[0], *args), 3)
        return context.get_dummy_value()

    return numba.void(run, I8), generate


@intrinsic
def hidden(typing_context: Any, number: Any) -> Any:
    """Return the number in a way that LLVM cannot see through: it would unroll loops of a constant length.

    That made three times as much code of a kernel, which ran no faster.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(args[0].type, [args[0].type])
        return builder.asm(kind, "", "=r,0", args, side_effect=False)

    return I8(I8), generate


@intrinsic
def fence(typing_context: Any) -> Any:
    """Make stores past the caches visible to other threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.void(), generate


def streams_to(values: Tensor) -> bool:
    """Return True if fp32 values are large enough, and aligned, to be written past the caches.

    A line that is written whole need not be read first: a third less traffic than an ordinary copy.
    """
    return values.numel() >= STREAMED and values.data_ptr() % LINE_BYTES == 0


@helper
def copy(source: Any, target: Any, length: Any) -> None:
    for i in range(length):
        target[i] = source[i]


@helper
def write(source: Any, target: Any, length: Any, streams: Any) -> None:
    """Copy values, past the caches if ``streams``; ``target`` must then be aligned to a line."""
    num_whole = length // LINE * LINE
    if streams:
        for i in range(0, num_whole, LINE):
            stream(target, i, load(source, i))
    else:
        for i in range(0, num_whole, LINE):
            store(target, i, load(source, i))
    for i in range(num_whole, length):
        target[i] = source[i]
