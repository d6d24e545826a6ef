"""Masks of 16 bits, one for each number of a line: vector registers of predicates, in memory two bytes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from gradwire.ops.cpu.lines import F4, I4, I8, LINE, U2, Line, address, constant, fill, fold

_MASK = ir.IntType(LINE)
_BITS = ir.VectorType(ir.IntType(1), LINE)
_SIGN = -(1 << 31)


def _words(builder: Any, line: Any) -> Any:
    return builder.bitcast(line, ir.VectorType(ir.IntType(32), LINE))


@intrinsic
def signs_of(typing_context: Any, line: Any) -> Any:
    """Return the mask of numbers that have a sign."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _words(builder, args[0])
        return builder.bitcast(builder.icmp_signed("<", word, constant(word, 0)), _MASK)

    return U2(Line(F4)), generate


@intrinsic
def above(typing_context: Any, line: Any, bound: Any) -> Any:
    """Return the mask of integers above a bound."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line, bound = args
        limit = fill(builder, bound)
        return builder.bitcast(builder.icmp_signed(">", line, limit), _MASK)

    return U2(Line(I4), I4), generate


@intrinsic
def exceeds(typing_context: Any, line: Any, bounds: Any) -> Any:
    """Return the mask of numbers that are larger than those of another line."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fcmp_ordered(">", *args), _MASK)

    return U2(Line(F4), Line(F4)), generate


def _place(context: Any, builder: Any, kind: Any, codes: Any, index: Any) -> Any:
    return builder.bitcast(address(context, builder, kind, codes, index), _MASK.as_pointer())


@intrinsic
def load_mask(typing_context: Any, codes: Any, index: Any) -> Any:
    """Return the mask in the two bytes from ``index`` on, unchecked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_place(context, builder, signature.args[0], *args), align=1)

    return U2(codes, I8), generate


@intrinsic
def store_mask(typing_context: Any, codes: Any, index: Any, mask: Any) -> Any:
    """Write a mask to the two bytes from ``index`` on, unchecked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, index, mask = args
        builder.store(mask, _place(context, builder, signature.args[0], codes, index), align=1)
        return context.get_dummy_value()

    return types.void(codes, I8, U2), generate


@intrinsic
def count_both(typing_context: Any, codes: Any, index: Any, other: Any) -> Any:
    """Return the number of bits that are set both in the eight bytes from ``index`` on and from ``other``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, *indices = args
        places = [address(context, builder, signature.args[0], codes, index) for index in indices]
        kind = ir.IntType(64).as_pointer()
        words = [builder.load(builder.bitcast(place, kind), align=1) for place in places]
        return builder.ctpop(builder.and_(*words))

    return I8(codes, I8, I8), generate


@intrinsic
def choose(typing_context: Any, mask: Any, if_set: Any, if_not: Any) -> Any:
    """Return a line of ``if_set`` where the mask is set, of ``if_not`` elsewhere; both may be numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask, *values = args
        lines = [v if isinstance(v.type, ir.VectorType) else fill(builder, v) for v in values]
        return builder.select(builder.bitcast(mask, _BITS), *lines)

    kinds = [kind if isinstance(kind, Line) else F4 for kind in (if_set, if_not)]
    return Line(F4)(U2, *kinds), generate


@intrinsic
def negated(typing_context: Any, mask: Any, line: Any) -> Any:
    """Return a line, negated where the mask is set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask, line = args
        word = _words(builder, line)
        flipped = builder.xor(word, constant(word, _SIGN))
        return builder.bitcast(builder.select(builder.bitcast(mask, _BITS), flipped, word), line.type)

    return Line(F4)(U2, Line(F4)), generate


@intrinsic
def add_words(typing_context: Any, a: Any, b: Any) -> Any:
    """Return the sum of two lines of integers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(*args)

    return Line(I4)(Line(I4), Line(I4)), generate


@intrinsic
def add_where(typing_context: Any, mask: Any, total: Any, line: Any) -> Any:
    """Return ``total``, with a line of integers added to it where the mask is set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask, total, line = args
        return builder.select(builder.bitcast(mask, _BITS), builder.add(total, line), total)

    return Line(I4)(U2, Line(I4), Line(I4)), generate


@intrinsic
def sum_of_words(typing_context: Any, line: Any) -> Any:
    """Return the sum of 16 integers, of which 32 bits are kept."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fold(builder, args[0], builder.add)

    return I4(Line(I4)), generate


@intrinsic
def sum_as_integers(typing_context: Any, line: Any) -> Any:
    """Return the sum of 16 numbers, each without its fraction."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.fptosi(args[0], ir.VectorType(ir.IntType(64), LINE))
        return fold(builder, wide, builder.add)

    return I8(Line(F4)), generate
