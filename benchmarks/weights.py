"""Train a sharded language model with parameters gathered by encodings, and compare losses.

    python benchmarks/weights.py                                 minutes on 2 cores
    python benchmarks/weights.py --weights int8 --seeds 0 1 2 --steps 600

Two Gloo ranks train the model of examples/lm.py by FSDP2 and AdamW; gradients are exact (recipe fp32). The
gap is in held-out loss of the weights that the optimizer has stepped, against a run whose parameters torch
gathers, with the same seed.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

import gradwire
from gradwire.headroom import Machine
from gradwire.sharded import shard_blocks
from gradwire.testing import run_ranks, send_message

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from lm import LM, corpus, pieces, starts
from train_lm import learning_rate

EXACT = "torch"
WIDTH, LAYERS, LENGTH, BATCH, LR = 96, 3, 64, 8, 3e-3
NUM_RANKS, NUM_HELD_OUT = 2, 256


def train(rank: int, weights: str, seed: int, steps: int) -> float:
    """Return the held-out loss after the last step, in nats per byte."""
    text, held_out = corpus()
    torch.manual_seed(seed)
    model = shard_blocks(LM(WIDTH, LAYERS, LENGTH), None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    places = starts(text, (steps, NUM_RANKS, BATCH), LENGTH, seed)
    with gradwire.attach(model, "fp32", weights=None if weights == EXACT else weights):
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, LR)
            optimizer.zero_grad()
            model(*pieces(text, places[step, rank], LENGTH)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    with torch.no_grad():
        parts = starts(held_out, (NUM_HELD_OUT,), LENGTH, 0).split(64)
        return float(torch.stack([model(*pieces(held_out, part, LENGTH)) for part in parts]).mean())


def train_all(rank: int, rows: list[str], seeds: list[int], steps: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {row: [] for row in rows}
    for seed in seeds:
        for row in rows:
            found[row].append(train(rank, row, seed, steps))
            if rank == 0:
                send_message(f"{row}, seed {seed}: {found[row][-1]:.4f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8", "fp8", "int4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    rows = [EXACT, *options.weights]
    args = rows, options.seeds, options.steps
    found = run_ranks(train_all, NUM_RANKS, 3600, args=args, on_message=lambda _, line: print(line))[0]
    print(f"\n{Machine.here()}, Gloo, torch {torch.__version__}; {options.steps} steps")
    print(f"{'weights':10} {'loss':>8} {'gap':>9}   gaps of seeds")
    for row in rows:
        gaps = [own / exact - 1 for own, exact in zip(found[row], found[EXACT], strict=True)]
        each = ", ".join(f"{gap:+.2%}" for gap in gaps)
        print(f"{row:10} {statistics.mean(found[row]):8.4f} {statistics.mean(gaps):+9.2%}   {each}")


if __name__ == "__main__":
    main()
