"""Compare each kernel with a copy of the same tensor, in one run.

    python benchmarks/kernels.py                 one thread of this CPU, 16 Mi values
    python benchmarks/kernels.py --device cuda   this GPU, 128 Mi values

On CPU the figure is time over the copy's time. On CUDA it is the kernel's bandwidth, counting all it must
read and write, over the copy's bandwidth. Kernels and copies take turns, so that drift affects both alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from gradwire import ops, recipe
from gradwire.codecs import Blocks, Rotated
from gradwire.exchanges import TwoShot
from gradwire.headroom import Machine
from gradwire.ops import BlockFormat, Chunk, RotatedFormat, RotatedRows

RECIPES = ["int8", "fp8", "int4", "sign:rotated=false"]
ROTATED = ["int4:rotated=true", "int2", "sign"]
Calls = dict[str, tuple[Callable[[], None], int]]


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Return the time of one call; on CUDA the mean of ten calls, measured on the device."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    for _ in range(10):
        run()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e4


def kernels(form: BlockFormat, numel: int, device: str) -> Calls:
    """Return the calls of an exchange between two ranks, and the bytes that each must move."""
    values, own = torch.randn(numel, device=device), torch.randn(numel, device=device)
    residual = torch.zeros(numel, device=device)
    num_bytes = form.row_bytes(numel)
    row = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    rows = torch.zeros(2, -(-num_bytes // 64) * 64, dtype=torch.uint8, device=device)
    own_chunk, chunk = Chunk(own, row), Chunk(values, row)
    own_fed, fed = Chunk(own, row, residual), Chunk(values, row, residual)
    ops.encode_blocks(form, chunk)
    rows[1, :num_bytes] = row
    return {
        "encode": (lambda: ops.encode_blocks(form, chunk), 4 * numel + num_bytes),
        "encode, feedback": (
            lambda: ops.encode_blocks(form, fed),
            12 * numel + num_bytes,
        ),
        "decode": (lambda: ops.decode_blocks(form, row, values), 4 * numel + num_bytes),
        "decode, add, encode": (
            lambda: ops.reduce_blocks(form, own_chunk, rows, 0, 0.5),
            8 * numel + 2 * num_bytes,
        ),
        "decode, add, encode, feedback": (
            lambda: ops.reduce_blocks(form, own_fed, rows, 0, 0.5),
            16 * numel + 2 * num_bytes,
        ),
        "decode two, add": (
            lambda: ops.sum_blocks(form, own, rows, ops.NO_RANK, 0.5),
            4 * numel + 2 * num_bytes,
        ),
    }


def rotated_kernels(form: RotatedFormat, numel: int, device: str) -> Calls:
    """Return the same for rotated blocks, whose kernels take no residual."""
    values, own = torch.randn(numel, device=device), torch.randn(numel, device=device)
    num_bytes = form.row_bytes(numel)
    row = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    rows = torch.zeros(2, -(-num_bytes // 64) * 64, dtype=torch.uint8, device=device)
    chunk, own_chunk, terms = (
        Chunk(values, row),
        Chunk(own, row.clone()),
        RotatedRows(form, rows, ops.NO_SEED),
    )
    ops.encode_rotated(form, chunk)
    rows[1, :num_bytes] = row
    return {
        "encode": (lambda: ops.encode_rotated(form, chunk), 4 * numel + num_bytes),
        "decode": (lambda: ops.decode_rotated(form, row, values, ops.NO_SEED), 4 * numel + num_bytes),
        "decode, add, encode": (
            lambda: ops.reduce_rotated(form, own_chunk, terms, 0, 0.5),
            8 * numel + 2 * num_bytes,
        ),
        "decode two, add": (
            lambda: ops.sum_rotated(own, terms, ops.NO_RANK, 0.5),
            4 * numel + 2 * num_bytes,
        ),
    }


def kernels_of(name: str, numel: int, device: str) -> Calls:
    exchange = recipe(name).exchange
    assert isinstance(exchange, TwoShot)
    if isinstance(exchange.codec, Rotated):
        return rotated_kernels(exchange.codec.format, numel, device)
    assert isinstance(exchange.codec, Blocks)
    return kernels(exchange.codec.format, numel, device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=int, help="values; by default 16 Mi on CPU and 128 Mi on CUDA")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--recipes", nargs="+", default=RECIPES + ROTATED)
    options = parser.parse_args()
    device = options.device
    numel = options.numel or (1 << 24 if device == "cpu" else 1 << 27)
    torch.set_num_threads(1)
    ops.warm_up(torch.device(device), ["blocks", "rotated"])
    where = torch.cuda.get_device_name() if device == "cuda" else f"{Machine.here()}, one thread"
    print(f"{where}; {numel / 2**20:g} Mi fp32 values; torch {torch.__version__}")

    source, target = torch.randn(numel, device=device), torch.empty(numel, device=device)
    unit = "time over the copy's" if device == "cpu" else "bandwidth over the copy's"
    print(f"{'':18} {'':32} {'ms':>8}   {unit}")
    for name in options.recipes:
        for what, (run, num_bytes) in kernels_of(name, numel, device).items():
            run()
            times, ratios = [], []
            for _ in range(options.rounds):
                copy = seconds_of(lambda: target.copy_(source), device)
                times.append(seconds_of(run, device))
                ratio = times[-1] / copy
                ratios.append(ratio if device == "cpu" else num_bytes / (8 * numel) / ratio)
            ms, ratio = 1e3 * statistics.median(times), statistics.median(ratios)
            print(f"{name:18} {what:32} {ms:8.2f}   {ratio:6.2f}", flush=True)
    copies = [seconds_of(lambda: target.copy_(source), device) for _ in range(options.rounds)]
    copy = statistics.median(copies)
    print(f"{'':18} {'copy':32} {1e3 * copy:8.2f}     1.00  ({8 * numel / copy / 1e9:.0f} GB/s)")


if __name__ == "__main__":
    main()
