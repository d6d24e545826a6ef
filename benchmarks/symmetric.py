"""Averaging in few bits through symmetric memory, beside the exchange over NCCL, in one run.

    python benchmarks/symmetric.py                       a rank for each GPU, at most 8
    python benchmarks/symmetric.py --recipes int4 --mb 1 25 100

GPUs that reach one another's memory need no messages. A rank encodes each chunk straight to its owner's
memory; after a barrier on the device, the owner sums; after another, all decode the sums where they lie. The
kernels and the rows are those of the library, so both ways must end with the same bits, which is checked.

With one GPU, two ranks share it, which torch allows for tests. They run in turns there, and a barrier waits
for a turn: the bits are checked, and the times say little. Where nothing of this works, the reason is
printed, and the exit code is 0.
"""

import argparse
import dataclasses
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from gradwire.buckets import BucketLayout
from gradwire.buckets.layout import Slot
from gradwire.codecs import Blocks
from gradwire.exchanges import Context, Scratch, TwoShot, average
from gradwire.exchanges.scatter import aligned, bounds_of, peers_of
from gradwire.ops import BlockFormat, Chunk, decode_blocks, encode_blocks, reduce_blocks
from gradwire.peers import Group, NcclGroup
from gradwire.testing import RanksFailed, run_ranks

LIMIT_S = 300.0
MAX_RANKS = 8
NUM_WARM_UP, NUM_REPEATS, NUM_ROUNDS = 3, 10, 5
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class CannotRun(Exception):
    """This machine lacks what symmetric memory needs."""


@dataclasses.dataclass(frozen=True)
class SymmetricExchange:
    """Averages values in memory that every rank can write to."""

    form: BlockFormat
    group: Group
    arriving: list[Tensor]
    """The rows that arrive at each rank, a matrix of bytes with a row for each sender."""
    sums: list[Tensor]
    """The row of each rank's sum."""
    barrier: Callable[[], None]

    def average(self, flat: Tensor) -> None:
        """Replace ``flat`` by the mean over ranks, the same bits on every rank."""
        form, rank, size = self.form, self.group.rank, self.group.size
        chunks = [flat[start:end] for start, end in bounds_of(flat.numel(), size)]
        bytes_of = [form.row_bytes(chunk.numel()) for chunk in chunks]
        for peer in peers_of(self.group):
            encode_blocks(form, Chunk(chunks[peer], self.arriving[peer][rank, : bytes_of[peer]]))
        self.barrier()
        own = Chunk(chunks[rank], self.sums[rank][: bytes_of[rank]])
        reduce_blocks(form, own, self.arriving[rank], rank, 1 / size)
        # Before the next call writes to these rows again, each rank has passed a barrier of that call.
        self.barrier()
        for peer in peers_of(self.group):
            decode_blocks(form, self.sums[peer][: bytes_of[peer]], chunks[peer])


def open_symmetric(
    form: BlockFormat, numel: int, group: dist.ProcessGroup, device: torch.device
) -> SymmetricExchange:
    """Allocate symmetric memory for buckets of ``numel`` values; collective."""
    import torch.distributed._symmetric_memory as symmetric_memory

    size = group.size()
    stride = max(aligned(form.row_bytes(end - start)) for start, end in bounds_of(numel, size))
    memory = symmetric_memory.empty((size + 1) * stride, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group)
    arriving = [handle.get_buffer(rank, (size, stride), torch.uint8, 0) for rank in range(size)]
    sums = [handle.get_buffer(rank, (stride,), torch.uint8, size * stride) for rank in range(size)]
    return SymmetricExchange(form, NcclGroup(group), arriving, sums, handle.barrier)


def ms_of(run: Callable[[], object]) -> float:
    """Return the device's time for a call, the mean of several, on the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    begin.record()
    for _ in range(NUM_REPEATS):
        run()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor(begin.elapsed_time(end) / NUM_REPEATS)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measure(name: str, numel: int, group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the times of an average over NCCL and through memory, in ms; check that results are equal."""
    exchange = gradwire.recipe(name).exchange
    if not (isinstance(exchange, TwoShot) and isinstance(exchange.codec, Blocks)):
        raise ValueError(f"{name} is no recipe with a scale for each block of values")
    form, exchange = exchange.codec.format, dataclasses.replace(exchange, feedback=None)
    try:
        symmetric = open_symmetric(form, numel, group, device)
    except Exception as error:  # whatever torch's private module raises
        raise CannotRun(f"torch gives no symmetric memory: {error}") from error
    layout = BucketLayout(0, torch.float32, (Slot("values", 0, torch.Size([numel]), (1,)),))
    context = Context(NcclGroup(group), Scratch(), 1 / group.size(), layout)
    values = torch.randn(numel, device=device)
    by_nccl, by_memory = values.clone(), values.clone()
    average(by_nccl, exchange, context)
    symmetric.average(by_memory)
    torch.cuda.synchronize()
    assert torch.equal(by_nccl, by_memory), f"{name}, {numel} values: the two ways have different results"
    ways = [lambda: average(values, exchange, context), lambda: symmetric.average(values)]
    rounds = [[ms_of(way) for way in ways] for _ in range(NUM_WARM_UP + NUM_ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds[NUM_WARM_UP:], strict=True)]


def job(rank: int, recipes: list[str], sizes_mb: list[float]) -> list[tuple[str, float, float, float]]:
    """Return the recipe, the size of a bucket, and the times over NCCL and through memory, in ms."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:  # NCCL takes two ranks on one GPU only if they seem to be on two hosts
        os.environ.update({"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", SHARED_GPU: "1"})
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    assert group is not None
    found = []
    for name in recipes:
        for size_mb in sizes_mb:
            over_nccl, in_memory = measure(name, int(size_mb * 2**20 / 4), group, device)
            found.append((name, size_mb, over_nccl, in_memory))
    return found


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
    options = parser.parse_args()
    try:
        world_size = num_ranks()
        if torch.cuda.device_count() == 1:
            print("one GPU, which two ranks share in turns: the times say little")
        rows = run_ranks(job, world_size, timeout=LIMIT_S, args=(options.recipes, options.mb))[0]
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
    print(f"{'':8} {'MB':>6} {'NCCL, ms':>10} {'memory, ms':>11} {'NCCL over it':>13}")
    for name, size_mb, over_nccl, in_memory in rows:
        print(
            f"{name:8} {size_mb:6g} {over_nccl:10.3f} {in_memory:11.3f} {over_nccl / in_memory:13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
