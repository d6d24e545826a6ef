"""Find the fastest tile and number of warps of each block kernel on this GPU.

    python benchmarks/tune.py                                  some 300 kernels, a second to compile each
    python benchmarks/tune.py --operations reduce --kinds int4
    python benchmarks/tune.py --kinds int2                     rotated blocks, by the registers of a thread

For each number of values per program and each number of warps, prints the kernel's bandwidth over that of a
copy of the same tensor, without feedback and with it, best first. The table in gradwire.ops.cuda.blocks was
chosen this way, on an H200.
"""

import argparse
import statistics

import torch

from gradwire import recipe
from gradwire.codecs import Blocks
from gradwire.exchanges import TwoShot
from gradwire.ops.cuda import blocks, rotated
from kernels import RECIPES, ROTATED, Calls, kernels, kernels_of, seconds_of

OPERATIONS = {
    "encode": ["encode", "encode, feedback"],
    "decode": ["decode"],
    "reduce": ["decode, add, encode", "decode, add, encode, feedback"],
}
TILES, WARPS = (256, 512, 1024, 2048, 4096), (1, 2, 4, 8)
VALUES_PER_THREAD = range(2, 65)
REGISTERS = (64, 80, 96, 128, 168, None)
NUM_VALUES, NUM_ROUNDS, NUM_SHOWN = 1 << 27, 5, 5


def ratios_of(runs: Calls, names: list[str], source: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Return the bandwidth of each run over that of a copy."""
    ratios = []
    for run, num_bytes in (runs[name] for name in names):
        run()
        pairs = [
            (seconds_of(lambda: target.copy_(source), "cuda"), seconds_of(run, "cuda"))
            for _ in range(NUM_ROUNDS)
        ]
        share = num_bytes / (8 * NUM_VALUES)
        ratios.append(statistics.median(share * copy / own for copy, own in pairs))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--kinds", nargs="+", choices=RECIPES + ROTATED, default=RECIPES)
    options = parser.parse_args()
    source, target = torch.randn(NUM_VALUES, device="cuda"), torch.empty(NUM_VALUES, device="cuda")
    print(f"{torch.cuda.get_device_name()}; {NUM_VALUES >> 20} Mi fp32 values; torch {torch.__version__}")
    print(f"{'':8} {'':8} {'values':>6} {'warps':>6}   bandwidth over the copy's, with feedback")
    for operation in options.operations:
        for kind in options.kinds:
            if kind in ROTATED:
                runs = kernels_of(kind, NUM_VALUES, "cuda")
                for registers in REGISTERS:
                    rotated._TUNED[operation] = registers
                    (ratio,) = ratios_of(runs, OPERATIONS[operation][:1], source, target)
                    print(
                        f"{operation:8} {kind:13} {registers or 'any':>6} registers   {ratio:6.3f}",
                        flush=True,
                    )
                continue
            exchange = recipe(kind).exchange
            assert isinstance(exchange, TwoShot)
            assert isinstance(exchange.codec, Blocks)
            runs = kernels(exchange.codec.format, NUM_VALUES, "cuda")
            found = []
            for tile, num_warps in ((tile, warps) for tile in TILES for warps in WARPS):
                if tile // num_warps // 32 not in VALUES_PER_THREAD:
                    continue
                blocks._TUNED[operation][kind] = tile, num_warps
                ratios = ratios_of(runs, OPERATIONS[operation], source, target)
                found.append((ratios, tile, num_warps))
            for ratios, tile, num_warps in sorted(found, reverse=True)[:NUM_SHOWN]:
                figures = " ".join(f"{ratio:6.3f}" for ratio in ratios)
                print(f"{operation:8} {kind:8} {tile:6} {num_warps:6}   {figures}", flush=True)


if __name__ == "__main__":
    main()
