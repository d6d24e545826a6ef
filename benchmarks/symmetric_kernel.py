"""Averaging through the memory of other GPUs in one kernel: encode, exchange, sum, encode and decode.

Program p of each rank works on the same tiles of every chunk. So it waits for program p of the other ranks
alone, not for a whole kernel: a flag for each program, each sender and each round says that the sender's rows
have arrived. Flags count calls, so that nothing has to set them back.

A program that waits keeps its place on the GPU. So all programs of all ranks of a GPU must have a place there
at once, and registers, which decide how many have, are limited.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.ops import NO_RANK, BlockFormat
from gradwire.ops.cuda.blocks import _decode_tile, _encode_tile, _reduce_tile
from gradwire.ops.cuda.codes import Tile

VALUES_PER_TILE, NUM_WARPS, REGISTERS_PER_THREAD = 1024, 2, 128
REGISTERS_PER_PROCESSOR = 65536  # of every NVIDIA GPU since 2014


@triton.jit
def _memory(memories, rank):
    """Return the address of a rank's memory."""
    return tl.multiple_of(tl.load(memories + rank).to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def _row(memory, number, stride, first_scale):
    """Return the addresses of a row's codes and scales."""
    codes = memory + number.to(tl.int64) * stride
    return codes, codes.to(tl.pointer_type(tl.int16)) + first_scale


@triton.jit
def _chunk(chunks, number):
    """Return a chunk's first value, full blocks, values beyond them, and its row's first scale."""
    place = chunks + 4 * number
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)


@triton.jit
def _num_tiles(num_full, tail, TILE: tl.constexpr):
    """Return the number of whole tiles, and of all: blocks that are too few for a tile have one each."""
    num_whole = num_full // TILE.num_blocks
    return num_whole, num_whole + num_full % TILE.num_blocks + (tail > 0).to(tl.int64)


@triton.jit
def _block(tile, num_whole, num_full, tail, TILE: tl.constexpr):
    """Return the block of a tile that is not whole, its bytes and its values."""
    block = num_whole * (TILE.num_blocks - 1) + tile
    m = tl.where(block < num_full, TILE.block, tail).to(tl.int32)
    return block, (m + TILE.planes - 1) // TILE.planes, m


@triton.jit
def _encode_chunk(
    values, memories, to, number, stride, chunks, chunk, COUNT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Encode a chunk into the same row of the memories of ``COUNT`` ranks, from ``to`` on."""
    start, num_full, tail, first_scale = _chunk(chunks, chunk)
    num_whole, num_tiles = _num_tiles(num_full, tail, TILE)
    own = values + start
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        for peer in range(COUNT):
            row = _row(_memory(memories, to + peer), number, stride, first_scale)
            if tile < num_whole:
                block = tile * TILE.num_blocks
                _encode_tile(own, own, row, (0, 0), block, TILE.width, TILE.block, True, 0, TILE)
            else:
                block, h, m = _block(tile, num_whole, num_full, tail, TILE)
                _encode_tile(own, own, row, (0, 0), block, h, m, False, 0, TILE)


@triton.jit
def _sum_chunk(
    values, memory, number, stride, into, chunks, chunk, own_index, factor,
    SIZE: tl.constexpr, IS_SUM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the rows from ``number`` on, and encode the sum into the row ``into``, unless ``IS_SUM``."""
    start, num_full, tail, first_scale = _chunk(chunks, chunk)
    num_whole, num_tiles = _num_tiles(num_full, tail, TILE)
    rows, _ = _row(memory, number, stride, first_scale)
    row = _row(memory, into, stride, first_scale)
    halves = rows.to(tl.pointer_type(tl.int16))
    terms = (rows, halves, SIZE, stride, first_scale, own_index, factor, 1.0)
    own = values + start
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        if tile < num_whole:
            block = tile * TILE.num_blocks
            _reduce_tile(terms, own, own, row, (0, 0), block, TILE.width, TILE.block, True, IS_SUM, 0, TILE)
        else:
            block, h, m = _block(tile, num_whole, num_full, tail, TILE)
            _reduce_tile(terms, own, own, row, (0, 0), block, h, m, False, IS_SUM, 0, TILE)


@triton.jit
def _decode_chunk(values, memory, number, stride, chunks, chunk, TILE: tl.constexpr):
    start, num_full, tail, first_scale = _chunk(chunks, chunk)
    num_whole, num_tiles = _num_tiles(num_full, tail, TILE)
    codes, scales = _row(memory, number, stride, first_scale)
    own = values + start
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        if tile < num_whole:
            _decode_tile(codes, scales, own, tile * TILE.num_blocks, TILE.width, TILE.block, True, TILE)
        else:
            block, h, m = _block(tile, num_whole, num_full, tail, TILE)
            _decode_tile(codes, scales, own, block, h, m, False, TILE)


@triton.jit
def _meet(memories, flags_at, rank, number, call, SIZE: tl.constexpr):
    """Tell this program of the other ranks that its rows have arrived, and wait until theirs have."""
    tl.debug_barrier()  # all threads have written
    for step in range(1, SIZE):
        peer = (rank + step) % SIZE
        flags = (_memory(memories, peer) + flags_at).to(tl.pointer_type(tl.int32))
        place = (number * SIZE + rank) * tl.num_programs(0) + tl.program_id(0)
        tl.atomic_xchg(flags + place, call, sem="release", scope="sys")
    flags = (_memory(memories, rank) + flags_at).to(tl.pointer_type(tl.int32))
    for step in range(1, SIZE):
        peer = (rank + step) % SIZE
        place = (number * SIZE + peer) * tl.num_programs(0) + tl.program_id(0)
        while tl.atomic_add(flags + place, 0, sem="acquire", scope="sys") < call:
            pass
    tl.debug_barrier()  # before any thread reads


@triton.jit(do_not_specialize=["rank", "call"])
def _average(
    values, memories, chunks, rank, call, stride, flags_at, factor,
    SIZE: tl.constexpr, IN_ONE_ROUND: tl.constexpr, TILE: tl.constexpr, NO_RANK: tl.constexpr,
):  # fmt: skip
    own = _memory(memories, rank)
    if IN_ONE_ROUND:
        # In turn: a rank may be one call ahead of another, which still reads its rows.
        first = (call % 2) * SIZE
        _encode_chunk(values, memories, 0, first + rank, stride, chunks, 0, SIZE, TILE)
        _meet(memories, flags_at, rank, 0, call, SIZE)
        _sum_chunk(values, own, first, stride, first, chunks, 0, NO_RANK, factor, SIZE, True, TILE)
    else:
        for step in range(1, SIZE):
            to = (rank + step) % SIZE
            _encode_chunk(values, memories, to, rank, stride, chunks, to, 1, TILE)
        _meet(memories, flags_at, rank, 0, call, SIZE)
        into = rank * 0 + SIZE
        _sum_chunk(values, own, rank * 0, stride, into, chunks, rank, rank, factor, SIZE, False, TILE)
        _meet(memories, flags_at, rank, 1, call, SIZE)
        for step in range(1, SIZE):
            owner = (rank + step) % SIZE
            _decode_chunk(values, _memory(memories, owner), into, stride, chunks, owner, TILE)


@dataclasses.dataclass
class OneKernel:
    """Averages values in memory that every rank can write to, in one kernel."""

    form: BlockFormat
    rank: int
    memories: Tensor
    """The address of each rank's memory: rows of ``stride`` bytes, twice as many as ranks, then flags."""
    bounds: list[tuple[int, int]]
    """The first value and the end of each chunk: one for each rank, or one chunk of all values."""
    stride: int
    num_programs: int
    num_calls: int = 0

    def __post_init__(self) -> None:
        form = self.form
        self.size = len(self.memories)
        self.tile = Tile.of(form, num_blocks=max(VALUES_PER_TILE // form.block, 1))
        rows = [
            [start, *divmod(end - start, form.block), form.scales_offset(end - start) // 2]
            for start, end in self.bounds
        ]
        self.chunks = torch.tensor(rows, device=self.memories.device)

    def average(self, flat: Tensor) -> None:
        """Replace ``flat`` by the mean over ranks, the same bits on every rank."""
        self.num_calls += 1
        _average[(self.num_programs,)](
            flat,
            self.memories,
            self.chunks,
            self.rank,
            self.num_calls,
            self.stride,
            2 * self.size * self.stride,
            1 / self.size,
            SIZE=self.size,
            IN_ONE_ROUND=len(self.bounds) == 1,
            TILE=self.tile,
            NO_RANK=NO_RANK,
            num_warps=NUM_WARPS,
            maxnreg=REGISTERS_PER_THREAD,
            enable_fp_fusion=False,
        )


def num_programs(form: BlockFormat, numel: int, num_sharing: int, device: torch.device) -> int:
    """Return the number of programs for chunks of at most ``numel`` values, if so many ranks share a GPU."""
    gpu = torch.cuda.get_device_properties(device)
    per_processor = REGISTERS_PER_PROCESSOR // (REGISTERS_PER_THREAD * NUM_WARPS * gpu.warp_size)
    num_places = gpu.multi_processor_count * per_processor // num_sharing
    return min(-(-numel // max(VALUES_PER_TILE, form.block)), num_places)


def flag_bytes(size: int, num_programs: int) -> int:
    """Return the bytes of the flags of that many ranks."""
    return 4 * 2 * size * num_programs
