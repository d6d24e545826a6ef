"""What numba lacks for runs of values: parts that cost nothing, reading ahead, writing past the caches."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from torch import Tensor

from gradwire.ops.cpu.compiling import helper
from gradwire.ops.cpu.scalars import F4, I8

# What one store past the caches writes: a cache line of fp32.
LINE = 16
LINE_BYTES = 64

# From so many values on, 8 MiB, what is decoded goes past the caches: what the last of them holds is
# better left in it, since DDP reads it next.
STREAMED = 1 << 21

_VECTOR = ir.VectorType(ir.FloatType(), LINE)


def span(rows: Tensor) -> Tensor:
    """The memory of a matrix from its first row to the end of its last, with what lies between rows."""
    return rows.as_strided(((len(rows) - 1) * rows.stride(0) + rows.shape[1],), (1,))


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _vector_address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.bitcast(_address(context, builder, kind, array, index), _VECTOR.as_pointer())


@intrinsic
def part(typing_context: Any, array: Any, start: Any, length: Any) -> Any:
    """``length`` values of a longer array from ``start`` on, unchecked; the array must outlive them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type
        item = context.get_constant(numba.intp, kind.dtype.bitwidth // 8)
        view = context.make_array(kind)(context, builder)
        data = _address(context, builder, signature.args[0], args[0], args[1])
        populate_array(view, data, [args[2]], [item], item, None)
        return view._getvalue()

    return array(array, I8, I8), generate


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        address = builder.bitcast(_address(context, builder, signature.args[0], *args), byte)
        # To read, into all caches, data.
        how = [ir.Constant(word, value) for value in (0, 3, 1)]
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [byte], function), [address, *how])
        return context.get_dummy_value()

    return numba.void(array, I8), generate


@intrinsic
def _stream(typing_context: Any, source: Any, target: Any, index: Any) -> Any:
    """Copy a line past the caches; in ``target`` it begins at a multiple of its own size."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (
            _vector_address(context, builder, kind, array, args[2])
            for kind, array in zip(signature.args[:2], args[:2], strict=True)
        )
        line = builder.load(source, align=4)
        mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        builder.store(line, target, align=LINE_BYTES).set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return numba.void(source, target, I8), generate


@intrinsic
def fence(typing_context: Any) -> Any:
    """Let other threads see what was written past the caches."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.void(), generate


@intrinsic
def sum_by_halves(typing_context: Any, lanes: Any) -> Any:
    """The sum of the first 16 values: the second half added to the first, until one is left."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = ir.Constant(ir.IntType(64), 0)
        vector = builder.load(_vector_address(context, builder, signature.args[0], args[0], first), align=4)
        width = LINE
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(
                    vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), width), list(places))
                )
                for places in (range(width), range(width, 2 * width))
            )
            vector = builder.fadd(low, high)
        return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    return F4(lanes), generate


@helper
def fetch(array: Any, start: Any, length: Any) -> None:
    """Begin to read what will be needed soon, if there is so much."""
    for i in range(start, min(start + length, array.size), LINE):
        _prefetch(array, i)


def streams_to(values: Tensor) -> bool:
    """Whether fp32 values are so many that they are better written past the caches, and can be.

    A line that is written whole need not be read first: a third less traffic than an ordinary copy.
    """
    return values.numel() >= STREAMED and values.data_ptr() % LINE_BYTES == 0


@helper
def write(source: Any, target: Any, streams: Any) -> None:
    """Copy, past the caches if that is wanted; ``target`` then begins at a multiple of a line."""
    if streams:
        num_full = target.size // LINE * LINE
        for i in range(0, num_full, LINE):
            _stream(source, target, i)
        for i in range(num_full, target.size):
            target[i] = source[i]
    else:
        for i in range(target.size):
            target[i] = source[i]
