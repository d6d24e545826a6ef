"""Kernels touch nothing outside of their operands and their scratch memory.

Kernels use pointers that nothing checks. Here a page that nobody may touch lies right behind each operand, or
right before it. The rest of its own pages is filled with a pattern that must stay. Cases run in a child
process, so that one which ends it by a signal is known by name.
"""

import ctypes
import faulthandler
import functools
import mmap
import os
import signal
import sys
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradwire import ops
from gradwire.ops import Batch, Batches, BlockFormat, Chunk, Matrix, RotatedFormat, RotatedRows, Seed, Terms
from gradwire.ops.cpu import blocks, casts, low_rank, rotated
from gradwire.ops.cpu.vectors import STREAMED

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PATTERN = 0xA5
SIDES = ["behind", "before"]
SIZES = [1, 2, 15, 16, 17, 31, 33, 127, 129, 200, 1023, 1024, 4097]
# The smallest that is written past the caches, with a rest.
LARGE = STREAMED + 133

pytestmark = pytest.mark.skipif(LIBC is None, reason="needs fork, and mprotect as Linux has it")


@functools.cache
def drawn(numel):
    return np.random.default_rng(numel).standard_normal(numel, np.float32)


class Fences:
    """Memory with a page that nobody may touch on one side."""

    def __init__(self, side):
        self.side = side
        self._parts = []

    def take(self, numel, dtype=torch.float32, skip=0):
        """Return a tensor ``skip`` values away from the page, or next to it."""
        page, size, gap = mmap.PAGESIZE, numel * dtype.itemsize, skip * dtype.itemsize
        inner = -(-max(size + gap, 1) // page) * page
        memory = mmap.mmap(-1, inner + 2 * page)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for address in (first, first + page + inner):
            assert LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), 0) == 0
        begin = inner - gap - size if self.side == "behind" else gap
        usable = np.frombuffer(memory, np.uint8, inner, page)
        outside = usable[:begin], usable[begin + size :]
        for part in outside:
            part[:] = PATTERN
        self._parts += outside
        return torch.from_numpy(usable[begin : begin + size]).view(dtype)

    def values(self, numel, skip=0):
        """Return random fp32 values."""
        found = self.take(numel, skip=skip)
        found.numpy()[:] = drawn(numel)
        return found

    def check(self):
        for part in self._parts:
            assert (part == PATTERN).all(), "written outside of a tensor"


def check_blocks(fences, form, n, residual, skip):
    def kept():
        return None if residual is None else fences.take(n, residual, skip).zero_()

    row = fences.take(form.row_bytes(n), torch.uint8)
    ops.encode_blocks(form, Chunk(fences.values(n, skip), row, kept(), Seed(5, 6)))
    ops.decode_blocks(form, row, fences.values(n, skip))
    for num_rows, more in ((2, 0), (3, 64)):
        rows = fences.take(num_rows * (row.numel() + more), torch.uint8).view(num_rows, -1)
        rows[:, : row.numel()] = row
        chunk = Chunk(fences.values(n, skip), fences.take(row.numel(), torch.uint8), kept(), Seed(7, 8))
        ops.reduce_blocks(form, chunk, rows, num_rows - 2, 0.5)
        for own_index in (num_rows - 1, ops.NO_RANK):
            ops.sum_blocks(form, fences.values(n, skip), rows, own_index, 0.5)


def check_rotated(fences, form, worker, n, skip):
    row = fences.take(worker.row_bytes(n), torch.uint8)
    ops.encode_rotated(worker, Chunk(fences.values(n, skip), row, None, Seed(3, 4)))
    ops.decode_rotated(worker, row, fences.values(n, skip), Seed(3, 4))
    rows = fences.take(3 * row.numel(), torch.uint8).view(3, -1)
    rows[:] = row
    chunk = Chunk(fences.values(n, skip), fences.take(form.row_bytes(n), torch.uint8), None, Seed(5, 6))
    terms = RotatedRows(worker, rows, Seed(1, 2))
    ops.reduce_rotated(form, chunk, terms, 1, 0.5)
    for own_index in (1, ops.NO_RANK):
        ops.sum_rotated(fences.values(n, skip), terms, own_index, 0.5)


def check_casts(fences, dtype, n, skip):
    ops.absmax(fences.values(n, skip))
    if dtype != torch.float32:
        halves = fences.take(n, dtype, skip)
        ops.cast_scaled(fences.values(n, skip), 2.0, halves)
        ops.cast_scaled(halves, 0.5, fences.values(n, skip))
    header = 4 if dtype == torch.float16 else 0
    row_bytes = -(-(header + n * dtype.itemsize) // 4) * 4
    for num_rows, more in ((2, 0), (3, 64)):
        rows = fences.take(num_rows * (row_bytes + more), torch.uint8).view(num_rows, -1).zero_()
        own, scales = fences.values(n, skip), [0.5] * num_rows
        encoded = own if dtype == torch.float32 else fences.take(n, dtype, skip)
        ops.reduce_rows(Terms(own, 1, rows, scales, header), encoded, 1.0, 1.0)
        for own_index in (0, ops.NO_RANK):
            ops.sum_rows(Terms(fences.values(n, skip), own_index, rows, scales, header), dtype)


def check_low_rank(fences, rows, columns, rank):
    matrices = tuple(Matrix("", number * rows * columns, rows, columns) for number in range(2))
    batches = Batches((Batch(matrices, rank, 0, 0, 0, 0),))
    numel, num_left, num_right = 2 * rows * columns, 2 * rank * rows, 2 * rank * columns
    flat, sums, votes = fences.values(numel), fences.values(numel), fences.values(2)
    (left, own_left), (right, own_right) = (
        [fences.values(size) for _ in range(2)] for size in (num_left, num_right)
    )
    low_rank.accumulate_and_project(batches, flat, sums, votes, right, left)
    low_rank.project_back(batches, sums, left, right)
    low_rank.accumulate_and_project_back(batches, flat, sums, votes, left, right)
    low_rank.judge(batches, "right", right, votes, fences.values(num_right))
    low_rank.orthogonalize(batches, "left", left, None)
    right[: num_right // 3] = 0
    low_rank.orthogonalize(batches, "right", right, fences.values(num_right))
    votes[:] = torch.tensor([1.0, 0.0])
    low_rank.finish(batches, flat, sums, left, right, own_left, own_right, votes)
    low_rank.finish(batches, flat, None, left, right, own_left, own_right, votes)


def block_cases():
    residuals = [None, torch.float32, torch.bfloat16]
    for kind in ("int8", "int4", "sign", "fp8"):
        for block in (32, 256):
            form = BlockFormat(kind, block, stochastic=kind != "sign" and block == 256)
            for number, n in enumerate(SIZES):
                yield check_blocks, form, n, residuals[number % 3], number % 2 * number
    yield check_blocks, BlockFormat("int4", 128), LARGE, None, 0


def rotated_cases():
    for bits in (1, 2, 3):
        for block in (128, 1024, 4096):
            for number, n in enumerate(SIZES):
                yield check_rotated, RotatedFormat(bits, block), RotatedFormat(4 - bits, block), n, number % 4
    yield check_rotated, RotatedFormat(2, 1024), RotatedFormat(2, 1024), LARGE, 0


def cast_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for number, n in enumerate([*SIZES, 2047, 2049]):
            yield check_casts, dtype, n, number % 2 * number
    yield check_casts, torch.bfloat16, LARGE, 0


def low_rank_cases():
    for rank in (1, 3, 4, 5, 16, 33):
        for rows, columns in ((1, 1), (33, 65), (40, 7), (75, 261)):
            yield check_low_rank, rows, columns, min(rank, rows, columns)


CASES = {"blocks": block_cases, "rotated": rotated_cases, "casts": cast_cases, "low_rank": low_rank_cases}


def first_failure(side, cases):
    """Run cases in a child process; return None, or the case that failed and how."""
    cases = list(cases)
    note = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            faulthandler.disable()
            torch.set_num_threads(1)  # other threads are the parent's
            for number, (check, *args) in enumerate(cases):
                note[:] = number.to_bytes(8, "little")
                fences = Fences(side)
                # Scratch memory is fenced too.
                torch.empty = fences.take
                casts.np = SimpleNamespace(**{**vars(np), "empty": numpy_scratch(fences)})
                check(fences, *args)
                fences.check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return None
    check, *args = cases[int.from_bytes(note[:], "little")]
    return check.__name__, args, status if status >= 0 else signal.Signals(-status).name


def numpy_scratch(fences):
    def empty(numel, dtype):
        return fences.take(numel, torch.from_numpy(np.zeros(0, dtype)).dtype).numpy()

    return empty


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", CASES)
def test_kernels_touch_nothing_outside_of_their_operands(family, side):
    assert first_failure(side, CASES[family]()) is None


@pytest.mark.parametrize(("side", "how"), [("behind", "SIGSEGV"), ("before", 1)])
def test_a_kernel_that_does_is_found(side, how):
    def check_overrun(fences, n):
        ops.cast_scaled(fences.values(n), 1.0, fences.take(n - 1, torch.bfloat16))

    assert first_failure(side, [(check_overrun, 40)]) == ("check_overrun", [40], how)


def test_the_kernels_in_use_are_those_of_numba():
    values = torch.ones(3)
    assert [ops._blocks(values), ops._rotated(values), ops._casts(values, torch.float32)] == [
        blocks, rotated, casts
    ]  # fmt: skip
    assert ops.low_rank(values, values) is low_rank
