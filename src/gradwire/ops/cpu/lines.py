"""Lines of 16 numbers as a type of numba: the contents of one, two or four vector registers.

Kernels work on lines, which LLVM maps to the processor's registers. LLVM's own vectorizer does worse with
loops over single numbers: it uses registers of half the width, and checks for overlapping arrays before each
block. `int4` of 1 Mi values in the cache took 0.46 ms that way, and takes 0.28 ms with lines.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, overload, register_model

I4, I8, F4, U1, U2 = numba.int32, numba.int64, numba.float32, numba.uint8, numba.uint16

LINE = 16


class Line(types.Type):
    """16 numbers of one type."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Line({dtype})")


@register_model(Line)
class _LineModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _vector(manager.lookup(kind.dtype).get_value_type()))


def _vector(item: Any) -> Any:
    return ir.VectorType(item, LINE)


def like(value: Any, item: Any) -> Any:
    """Return the type ``item``, or a line of it if ``value`` is a line."""
    return _vector(item) if isinstance(value.type, ir.VectorType) else item


def constant(value: Any, number: float) -> Any:
    """Return a constant of the type of ``value``; for a line, the number in each place."""
    kind = value.type
    return ir.Constant(kind, [number] * LINE if isinstance(kind, ir.VectorType) else number)


def fill(builder: Any, value: Any, width: int = LINE) -> Any:
    """Write LLVM's code for a vector with the number in each place."""
    empty = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(first, empty, mask)


def elementwise(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function that writes LLVM code.

    It takes numbers of these ``kinds``, or lines of them, or both at once.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        @functools.wraps(write)  # numba reads the names of the arguments
        def function(typing_context: Any, *args: Any) -> Any:
            is_line = [isinstance(arg, Line) for arg in args]

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                if any(is_line):
                    values = [
                        value if is_line_ or kind == numba.boolean else fill(builder, value)
                        for value, is_line_, kind in zip(values, is_line, kinds, strict=True)
                    ]
                return write(builder, *values)

            taken = [Line(kind) if is_line_ else kind for kind, is_line_ in zip(kinds, is_line, strict=True)]
            return (Line(result) if any(is_line) else result)(*taken), generate

        return intrinsic(function)

    return decorate


def _arithmetic(symbol: Any, instruction: str) -> None:
    """Define an operator for lines of fp32, and for a line and a number."""

    @elementwise(F4, F4, F4)
    def compute(builder: Any, a: Any, b: Any) -> Any:
        return getattr(builder, instruction)(a, b)

    def of_lines(a: Any, b: Any) -> Any:
        return compute(a, b)

    @overload(symbol)
    def choose(a: Any, b: Any) -> Any:
        return of_lines if isinstance(a, Line) or isinstance(b, Line) else None


for _symbol, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _arithmetic(_symbol, _instruction)


def address(context: Any, builder: Any, kind: Any, run: Any, index: Any) -> Any:
    """Return the address of the number at ``index`` of an array or a pointer."""
    is_array = isinstance(kind, types.Array)
    return builder.gep(context.make_array(kind)(context, builder, run).data if is_array else run, [index])


@intrinsic
def point(typing_context: Any, run: Any, index: Any) -> Any:
    """Return a pointer to a place in an array, or behind a pointer: unchecked and not reference-counted.

    An array that a kernel has made is freed after its last use, so it must be used after the pointer is.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return address(context, builder, signature.args[0], *args)

    return types.CPointer(run.dtype)(run, I8), generate  # type: ignore[attr-defined]


def _line_address(context: Any, builder: Any, kind: Any, run: Any, index: Any) -> Any:
    first = address(context, builder, kind, run, index)
    return builder.bitcast(first, _vector(first.type.pointee).as_pointer())


@intrinsic
def load(typing_context: Any, run: Any, index: Any) -> Any:
    """Return the line that begins at ``index``, unchecked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _line_address(context, builder, signature.args[0], *args)
        return builder.load(place, align=run.dtype.bitwidth // 8)

    return Line(run.dtype)(run, I8), generate


def mark_past_caches(builder: Any, stored: Any) -> None:
    """Make a store of whole, aligned lines go past the caches."""
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _store(past_caches: bool) -> Any:
    def function(typing_context: Any, run: Any, index: Any, line: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            run, index, line = args
            item_bytes = signature.args[0].dtype.bitwidth // 8
            place = _line_address(context, builder, signature.args[0], run, index)
            stored = builder.store(line, place, align=item_bytes * (LINE if past_caches else 1))
            if past_caches:
                mark_past_caches(builder, stored)
            return context.get_dummy_value()

        return numba.void(run, I8, line), generate

    return intrinsic(function)


# Store a line at an index, unchecked.
store = _store(past_caches=False)
# The same, past the caches; the line must be aligned to its own size.
stream = _store(past_caches=True)


@intrinsic
def spread(typing_context: Any, number: Any) -> Any:
    """Return a line with the number in each place."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fill(builder, args[0])

    return Line(number)(number), generate


@intrinsic
def counting(typing_context: Any, start: Any) -> Any:
    """Return the line of ``start``, ``start + 1`` and so on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = fill(builder, builder.trunc(args[0], ir.IntType(32)))
        return builder.add(first, ir.Constant(first.type, list(range(LINE))))

    return Line(I4)(I8), generate


def fold(builder: Any, line: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Join the second half to the first, until one number is left."""
    width = LINE
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                line, line, ir.Constant(ir.VectorType(ir.IntType(32), width), list(places))
            )
            for places in (range(width), range(width, 2 * width))
        )
        line = join(low, high)
    return builder.extract_element(line, ir.Constant(ir.IntType(32), 0))


@intrinsic
def sum_by_halves(typing_context: Any, line: Any) -> Any:
    """Return the sum: the second half is added to the first, until one number is left."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fold(builder, args[0], builder.fadd)

    return F4(Line(F4)), generate


@intrinsic
def largest_of(typing_context: Any, line: Any) -> Any:
    """Return the largest of 16 integers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def join(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        return fold(builder, args[0], join)

    return I4(Line(I4)), generate
