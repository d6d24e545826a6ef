"""Averaging in few bits through symmetric memory, beside the exchange over NCCL, in one run.

    python benchmarks/symmetric.py                       a rank for each GPU, at most 8, and at least 2
    python benchmarks/symmetric.py --recipes int4 --mb 1 25 100
    python benchmarks/symmetric.py --ranks 4             which may share a GPU

GPUs that reach one another's memory need no messages. "Kernels" are those of the library: a rank encodes
each chunk straight to its owner's memory; after a barrier on the device, the owner sums; after another, all
decode the sums where they lie. "One kernel" does all of that at once, and a program waits for its
counterparts alone. Two ranks need one round, as in the library. All ways must end with the same bits, which
is checked.

Ranks that share a GPU have no link between them: memory is as fast as their own, and NCCL sends by sockets.
Then the host's time is what can be compared, and that of small buckets. Where nothing of this works, the
reason is printed, and the exit code is 0.
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from gradwire.buckets import BucketLayout
from gradwire.buckets.layout import Slot
from gradwire.codecs import Blocks
from gradwire.exchanges import Context, Scratch, TwoShot, average
from gradwire.exchanges.one_shot import take_one_round
from gradwire.exchanges.scatter import aligned, bounds_of, peers_of
from gradwire.ops import (
    NO_RANK,
    BlockFormat,
    Chunk,
    decode_blocks,
    encode_blocks,
    reduce_blocks,
    sum_blocks,
)
from gradwire.peers import Group, NcclGroup
from gradwire.testing import RanksFailed, run_ranks
from groups import open_group, rank_environment
from steps import print_table

LIMIT_S = 300.0
MAX_RANKS = 8
NUM_CHECKED, NUM_WARM_UP, NUM_REPEATS, NUM_ROUNDS = 4, 3, 10, 5
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class CannotRun(Exception):
    """This machine lacks what symmetric memory needs."""


class Way(Protocol):
    """A way to average."""

    def average(self, flat: Tensor) -> None:
        """Replace ``flat`` by the mean over ranks, the same bits on every rank."""


@dataclasses.dataclass
class Kernels:
    """Averages values in memory that every rank can write to, by the library's kernels and barriers."""

    form: BlockFormat
    group: Group
    rows: list[Tensor]
    """The rows in each rank's memory, a matrix of bytes, twice as many as ranks."""
    bounds: list[tuple[int, int]]
    """The first value and the end of each chunk: one for each rank, or one chunk of all values."""
    barrier: Callable[[], None]
    num_calls: int = 0

    def average(self, flat: Tensor) -> None:
        self.num_calls += 1
        chunks = [flat[start:end] for start, end in self.bounds]
        if len(chunks) == 1:
            self._average_in_one_round(flat)
        else:
            self._average_in_two_rounds(chunks)

    def _average_in_one_round(self, flat: Tensor) -> None:
        rank, size, num_bytes = self.group.rank, self.group.size, self.form.row_bytes(flat.numel())
        # In turn: a rank may be one call ahead of another, which still reads its rows.
        first = self.num_calls % 2 * size
        for peer in range(size):
            encode_blocks(self.form, Chunk(flat, self.rows[peer][first + rank, :num_bytes]))
        self.barrier()
        sum_blocks(self.form, flat, self.rows[rank][first : first + size], NO_RANK, 1 / size)

    def _average_in_two_rounds(self, chunks: list[Tensor]) -> None:
        form, rank, size = self.form, self.group.rank, self.group.size
        bytes_of = [form.row_bytes(chunk.numel()) for chunk in chunks]
        for peer in peers_of(self.group):
            encode_blocks(form, Chunk(chunks[peer], self.rows[peer][rank, : bytes_of[peer]]))
        self.barrier()
        own = Chunk(chunks[rank], self.rows[rank][size, : bytes_of[rank]])
        reduce_blocks(form, own, self.rows[rank][:size], rank, 1 / size)
        # Before the next call writes to these rows again, each rank has passed a barrier of that call.
        self.barrier()
        for peer in peers_of(self.group):
            decode_blocks(form, self.rows[peer][size, : bytes_of[peer]], chunks[peer])


@dataclasses.dataclass(frozen=True)
class OverNccl:
    """Averages as the library does."""

    exchange: TwoShot
    context: Context

    def average(self, flat: Tensor) -> None:
        average(flat, self.exchange, self.context)


def share_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return torch's handle of zeros in each rank's memory; collective."""
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        handle = symmetric_memory.rendezvous(memory, group)
    except Exception as error:  # whatever torch's private module raises
        raise CannotRun(f"torch gives no symmetric memory: {error}") from error
    torch.cuda.synchronize()
    dist.barrier()  # flags of all ranks are zero
    return handle


def open_ways(exchange: TwoShot, numel: int, group: dist.ProcessGroup, device: torch.device) -> list[Way]:
    """Return the ways to average ``numel`` values, of which the first is over NCCL; collective."""
    from symmetric_kernel import OneKernel, flag_bytes, num_programs

    assert isinstance(exchange.codec, Blocks)
    form, size, rank = exchange.codec.format, group.size(), group.rank()
    (in_one_round,) = take_one_round([exchange.codec], size)
    bounds = [(0, numel)] if in_one_round else list(bounds_of(numel, size))
    stride = max(aligned(form.row_bytes(end - start)) for start, end in bounds)
    num_sharing = -(-size // torch.cuda.device_count())
    programs = num_programs(form, max(end - start for start, end in bounds), num_sharing, device)
    handle = share_memory(2 * size * stride + flag_bytes(size, programs), group, device)
    rows = [handle.get_buffer(peer, (2 * size, stride), torch.uint8, 0) for peer in range(size)]
    addresses = torch.tensor([each.data_ptr() for each in rows], device=device)
    layout = BucketLayout(0, torch.float32, (Slot("values", 0, torch.Size([numel]), (1,)),))
    nccl = NcclGroup(group)
    return [
        OverNccl(exchange, Context(nccl, Scratch(), 1 / size, layout)),
        Kernels(form, nccl, rows, bounds, handle.barrier),
        OneKernel(form, rank, addresses, bounds, stride, programs),
    ]


def ms_of(way: Way, flat: Tensor) -> tuple[float, float]:
    """Return the device's and the host's time for a call, the mean of several, on the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    host_begin = time.perf_counter()
    begin.record()
    for _ in range(NUM_REPEATS):
        way.average(flat)
    end.record()
    host_s = time.perf_counter() - host_begin
    torch.cuda.synchronize()
    slowest = torch.tensor([begin.elapsed_time(end), 1e3 * host_s], dtype=torch.float64) / NUM_REPEATS
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    on_device, on_host = slowest.tolist()
    return on_device, on_host


def measure(name: str, numel: int, group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return each way's time on the device and on the host, in ms; check that results are equal."""
    exchange = gradwire.recipe(name).exchange
    if not (isinstance(exchange, TwoShot) and isinstance(exchange.codec, Blocks)):
        raise ValueError(f"{name} is no recipe with a scale for each block of values")
    ways = open_ways(dataclasses.replace(exchange, feedback=None), numel, group, device)
    generator = torch.Generator(device).manual_seed(group.rank())
    over_nccl, *others = ways
    # Ways share memory. Each call has values of its own, so that none finds there what it has to send. And
    # none writes to rows that another way still reads: NCCL, which waits for all ranks, comes in between.
    for call, way in itertools.product(range(NUM_CHECKED), others):
        values = torch.randn(numel, device=device, generator=generator)
        expected = values.clone()
        over_nccl.average(expected)
        way.average(values)
        same = torch.equal(expected, values)
        assert same, f"{name}, {numel} values, call {call}: {type(way).__name__} and NCCL differ"
    rounds = [[ms for way in ways for ms in ms_of(way, values)] for _ in range(NUM_WARM_UP + NUM_ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds[NUM_WARM_UP:], strict=True)]


def job(rank: int, recipes: list[str], sizes_mb: list[float]) -> list[tuple[str, float, list[float]]]:
    """Return the recipe, the size of a bucket, and the times of `measure`."""
    os.environ[SHARED_GPU] = "1"
    group = open_group(rank, "cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    return [
        (name, size_mb, measure(name, int(size_mb * 2**20 / 4), group, device))
        for name in recipes
        for size_mb in sizes_mb
    ]


def num_ranks() -> int:
    """Return the number of ranks that this machine can hold; `CannotRun` if it has no GPUs that do."""
    if not torch.cuda.is_available():
        raise CannotRun("it has no GPU")
    num_gpus = min(torch.cuda.device_count(), MAX_RANKS)
    apart = [
        (a, b)
        for a in range(num_gpus)
        for b in range(num_gpus)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        raise CannotRun(f"its GPUs {apart[0][0]} and {apart[0][1]} do not reach each other's memory")
    return max(num_gpus, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=["int8", "int4"])
    parser.add_argument("--mb", nargs="+", type=float, default=[1, 4, 25, 100], help="sizes of a bucket")
    parser.add_argument("--ranks", type=int, help="by default one for each GPU, at most 8, and at least 2")
    options = parser.parse_args()
    arguments = options.recipes, options.mb
    try:
        world_size = options.ranks or num_ranks()
        with rank_environment(world_size, "cuda") as environment:
            rows = run_ranks(job, world_size, LIMIT_S, args=arguments, environment=environment)[0]
    except CannotRun as error:
        print(f"this machine cannot average through symmetric memory: {error}")
        return
    except RanksFailed as error:
        reasons = [line for line in str(error).splitlines() if CannotRun.__name__ in line]
        if not reasons:
            raise
        print(f"this machine cannot average through symmetric memory: {reasons[0]}")
        return
    print(f"{torch.cuda.get_device_name()}, {world_size} ranks; torch {torch.__version__}")
    ways = ["NCCL", "kernels", "one kernel"]
    header = ["a call, ms", "MB", *(f"{way}{of}" for way in ways for of in ("", ", host"))]
    print_table(
        header, [[f"`{name}`", f"{mb:g}", *(f"{ms:.3f}" for ms in times)] for name, mb, times in rows]
    )


if __name__ == "__main__":
    main()
