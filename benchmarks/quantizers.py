"""Ways to send a gradient in few bits: their error against their bits, on gradients of training.

    python benchmarks/quantizers.py

Each of four workers encodes the matrices of its own gradient, in the small setting of convergence.py.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from convergence import SETTINGS
from gradwire.codecs import Blocks, Codec, Rotated
from gradwire.ops import Chunk, Seed
from gradwire.recipes import table_names
from tasks import data_of
from trainer import Trainer

SCALE_BITS = 16
Quantizer = Callable[[Tensor, Tensor], Tensor]
"""Takes blocks of deviation 1 and random numbers from 0 to 1, and returns what arrives."""
Way = Callable[[Tensor, int], tuple[Tensor, float]]
"""Takes a worker's values and its number, and returns what arrives and the bits of a value."""


def by_codec(codec: Codec) -> Way:
    """Return the way of a codec of gradwire's."""

    def send(values: Tensor, worker: int) -> tuple[Tensor, float]:
        numel, seed = values.numel(), Seed.of(0, 0, 0).of_rank(worker)
        row, arrived = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8), torch.empty_like(values)
        codec.encode(Chunk(values.clone(), row, None, seed))
        codec.decode(row, arrived, seed)
        return arrived, 8 * row.numel() / numel

    return send


def by_blocks(
    quantize: Quantizer, bits: float, block: int = 1024, rotated: bool = True, shared: bool = False
) -> Way:
    """Return a way that scales blocks to deviation 1, rotates them, and quantizes them.

    ``shared`` gives all workers the same rotation.
    """

    def send(values: Tensor, worker: int) -> tuple[Tensor, float]:
        blocks = values[: values.numel() // block * block].view(-1, block)
        generator = torch.Generator().manual_seed(0 if shared else worker)
        signs = torch.randint(0, 2, blocks.shape, generator=generator) * 2.0 - 1
        x = hadamard(blocks * signs) if rotated else blocks
        deviation = x.square().mean(dim=1, keepdim=True).sqrt()
        noise = torch.rand(x.shape, generator=generator)
        arrived = quantize(x / deviation.clamp_min(1e-30), noise)
        # The scale of the smallest error.
        x_hat = arrived * ((x * arrived).sum(1, True) / arrived.square().sum(1, True).clamp_min(1e-30))
        result = values.clone()
        result[: blocks.numel()] = (hadamard(x_hat) * signs if rotated else x_hat).view(-1)
        return result, bits + SCALE_BITS / block

    return send


def hadamard(x: Tensor) -> Tensor:
    """Return each row times an orthonormal Hadamard matrix, which is its own inverse."""
    count, size = x.shape
    for stride in (1 << p for p in range(size.bit_length() - 1)):
        low, high = x.view(count, -1, 2, stride).unbind(2)
        x = torch.stack((low + high, low - high), dim=2).view(count, size)
    return x / math.sqrt(size)


def nearest(levels: Tensor, x: Tensor, noise: Tensor) -> Tensor:
    """Round to the nearest level."""
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]


def lloyd(x: Tensor, num_levels: int, num_rounds: int = 300) -> Tensor:
    """Return the levels of the smallest error for these values (Lloyd's algorithm)."""
    levels = x.quantile((torch.arange(num_levels) + 0.5) / num_levels)
    for _ in range(num_rounds):
        place = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        total = torch.zeros(num_levels).index_add(0, place, x)
        levels = total / torch.bincount(place, minlength=num_levels).clamp_min(1)
    return levels


def levels_of_each_block(num_levels: int, x: Tensor, noise: Tensor) -> Tensor:
    """Round to levels that are found for each block."""
    return torch.stack([nearest(lloyd(row, num_levels, 10), row, row) for row in x])


def uniform(step: float, num_levels: int | None, dither: str, x: Tensor, noise: Tensor) -> Tensor:
    """Round to multiples of a step: to the nearest, at random, or with a dither that receivers subtract."""
    offset = 0.0 if num_levels is None or num_levels % 2 else 0.5
    moved = x / step + offset
    number = torch.floor(moved + (0.5 if dither == "none" else noise))
    if num_levels is not None:
        number = number.clamp(-(num_levels // 2) + 2 * offset, num_levels // 2)
    return step * (number - offset - (noise - 0.5 if dither == "subtracted" else 0))


def entropy(codes: Tensor) -> float:
    """Return the entropy of numbers, in bits."""
    shares = codes.unique(return_counts=True)[1] / codes.numel()
    return float(-(shares * shares.log2()).sum())


def entropy_coded(step: float) -> Way:
    """Return a way that rounds to multiples of a step, and sends their numbers by an ideal entropy code."""
    quantize = partial(uniform, step, None, "none")
    found: list[float] = []

    def keep_bits(x: Tensor, noise: Tensor) -> Tensor:
        arrived = quantize(x, noise)
        found.append(entropy((arrived / step).round()))
        return arrived

    send = by_blocks(keep_bits, 0.0)

    def send_coded(values: Tensor, worker: int) -> tuple[Tensor, float]:
        arrived, scale_bits = send(values, worker)
        return arrived, scale_bits + found.pop()

    return send_coded


def ways() -> dict[str, Way]:
    """Return all ways by name, those of gradwire's recipes first. Steps are those of the smallest error."""
    normal = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    best = {bits: partial(nearest, lloyd(normal, 1 << bits)) for bits in (1, 2, 4)}
    return {
        "int8": by_codec(Blocks("int8", 256)),
        "int4": by_codec(Blocks("int4", 128)),
        "int3": by_codec(Rotated(3)),
        "int2": by_codec(Rotated(2)),
        "int2, 1 bit of a worker": by_codec(Rotated(1, unbiased=True)),
        "8 bits, rotated": by_blocks(partial(uniform, 0.0308, 256, "none"), 8),
        "4 bits, rotated": by_blocks(best[4], 4),
        "2 bits, not rotated": by_blocks(best[2], 2, rotated=False),
        "2 bits, blocks of 128": by_blocks(best[2], 2, 128),
        "2 bits, blocks of 4096": by_blocks(best[2], 2, 4096),
        "2 bits, one rotation for all": by_blocks(best[2], 2, shared=True),
        "2 bits, levels of each block": by_blocks(
            partial(levels_of_each_block, 4), 2 + 3 * SCALE_BITS / 1024
        ),
        "2 bits, uniform levels": by_blocks(partial(uniform, 1.0, 4, "none"), 2),
        "2 bits, rounded at random": by_blocks(partial(uniform, 0.8, 4, "random"), 2),
        "2 bits, subtracted dither": by_blocks(partial(uniform, 1.0, 4, "subtracted"), 2),
        "entropy-coded, step 0.9": entropy_coded(0.9),
        "entropy-coded, step 1.2": entropy_coded(1.2),
        "1 bit, the smallest error": by_blocks(best[1], 1),
    }


def gradients_of(num_steps: int) -> list[Tensor]:
    """Return the matrices of each worker's gradient, some steps into training."""
    data = data_of(SETTINGS["small"], torch.device("cpu"))
    trainer = Trainer(SETTINGS["small"], "fp32", 0, data, eager=True)
    for _ in range(num_steps - 1):
        trainer.step()
    trainer.backward(num_steps - 1)
    tables, ranks = table_names(trainer.model), trainer.ranks
    return [
        torch.cat([g.flatten() for name, g in own.items() if g.dim() > 1 and name not in tables])
        for own in (ranks.gradients(rank) for rank in range(ranks.world_size))
    ]


@dataclass(frozen=True)
class Measured:
    """What a way costs and loses."""

    bits: float
    """Of a value, with its share of the scales."""
    error: float
    """The square of what is lost over the square of the gradient."""
    error_of_mean: float
    """The same for the mean of all workers."""

    @property
    def least_bits(self) -> float:
        """Bits that no code for normal values can do without if it has this error."""
        return 0.5 * math.log2(1 / self.error)


def measure(send: Way, workers: list[Tensor]) -> Measured:
    """Send every worker's gradient."""
    arrived, bits = zip(*(send(values, worker) for worker, values in enumerate(workers)), strict=True)
    exact, found = torch.stack(workers), torch.stack(arrived)
    mean = exact.mean(dim=0)
    error = (found - exact).square().sum() / exact.square().sum()
    error_of_mean = (found.mean(dim=0) - mean).square().sum() / mean.square().sum()
    return Measured(sum(bits) / len(bits), float(error), float(error_of_mean))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="the step whose gradients are sent")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with Console(stderr=True).status("training ..."):
        workers = gradients_of(options.steps)
    table = Table(box=None)
    table.add_column("way", no_wrap=True)
    for title in ("bits", "error", "least bits", "error of the mean"):
        table.add_column(title, justify="right")
    for name, send in ways().items():
        found = measure(send, workers)
        errors = f"{found.error:.4f}", f"{found.least_bits:.3f}", f"{found.error_of_mean:.4f}"
        table.add_row(name, f"{found.bits:.3f}", *errors)
    Console().print(table)


if __name__ == "__main__":
    main()
