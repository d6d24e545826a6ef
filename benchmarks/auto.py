"""Recipe `auto` beside no recipe and fixed recipes, in one run, on links of several rates.

    python benchmarks/auto.py                        # four links and a change; root and iproute2, minutes
    python benchmarks/auto.py --links 100mbit        # one link
    python benchmarks/auto.py --links "1gbit>50mbit" # a rate that changes after the first 100 steps
    python benchmarks/auto.py --weights int8         # FSDP2 instead of DDP; recipes gather weights by int8

The model and the batches are those of examples/train.py, narrower on slower links. `auto` trains alone until
it has decided, for 100 steps. Then all rows take turns, in another order in each round. A step is zero_grad,
forward, backward and the optimizer's step; its time is that of the slowest rank. "best fixed" is the fastest
of the fixed recipes whose error, in the first step, is within the budget.
"""

import argparse
import contextlib
import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.headroom import Machine
from gradwire.lab import Lab
from gradwire.ranks import run_ranks, send_message
from turns import ratio, shuffled, slowest

LINKS = ["10mbit", "100mbit", "1gbit", "none", "1gbit>50mbit"]
WIDTHS = {"10mbit": 64, "100mbit": 128, "1gbit": 256, "none": 256, "1gbit>50mbit": 128}
FIXED = ["bf16", "int8", "int4:feedback=false", "int3", "int2"]
NUM_ALONE, STEPS_PER_TURN, NUM_AFTER_CHANGE = 100, 5, 100
TIMEOUT_S = 1200.0
NONE = "no recipe"


class Training:
    """The model and the loop of examples/train.py, with a recipe or without."""

    def __init__(self, recipe: str | None, width: int, weights: str | None) -> None:
        """Make a DDP model, or with ``weights`` an FSDP2 model, of which a recipe also gathers these."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self._is_sharded = weights is not None
        self.model: nn.Module = fully_sharded(model) if self._is_sharded else DistributedDataParallel(model)
        self.wire = None if recipe is None else gradwire.attach(self.model, recipe, weights=weights)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._width = width
        self._num_steps = 0

    def step(self) -> float:
        """Train for one step, and return its seconds."""
        torch.manual_seed(1000 * self._num_steps + dist.get_rank())
        self._num_steps += 1
        begin = time.perf_counter()
        tokens = torch.randn(2, 32, self._width)
        self._optimizer.zero_grad()
        (self.model(tokens) - tokens.roll(1, dims=1)).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - begin

    def error(self, exact: "Training") -> float:
        """Return the relative error of the last gradient in the sense of the budget that is larger."""
        parameters = zip(self.model.parameters(), exact.model.parameters(), strict=True)
        pairs = [(_own(p), _own(q)) for p, q in parameters if p.grad is not None and q.grad is not None]
        rows = [((p - q).square().sum(), q.square().sum(), torch.tensor(q.numel())) for p, q in pairs]
        sums = torch.tensor(rows, dtype=torch.float64)
        if self._is_sharded:
            dist.all_reduce(sums)
        errors, norms, sizes = sums[sums[:, 1] > 0].unbind(1)
        of_values = (errors / norms * sizes).sum() / sums[:, 2].sum()
        return math.sqrt(max(float(errors.sum() / norms.sum()), float(of_values)))


def fully_sharded(model: nn.TransformerEncoder) -> nn.Module:
    """Shard each layer by itself, and what is left."""
    for each in model.layers:
        fully_shard(each)
    fully_shard(model)
    return model


def _own(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient that this rank has: all of it, or its shard."""
    own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    assert own is not None
    return own


@dataclass(frozen=True)
class Found:
    """The figures of one run."""

    ms: dict[str, list[float]]
    """Times of steps by row, of the slowest rank."""
    errors: dict[str, float]
    """Relative errors of fixed recipes in the first step, in both senses of the budget."""
    decisions: str
    last: str
    """The last decision."""


def measure(rank: int, recipe: str, width: int, rounds: int, changes: bool, weights: str | None) -> Found:
    auto = Training(recipe, width, weights)
    for _ in range(NUM_ALONE):
        auto.step()
    if changes:
        if rank == 0:
            send_message("change")
        for _ in range(NUM_AFTER_CHANGE):
            auto.step()
    rows = {NONE: Training(None, width, weights)}
    rows |= {name: Training(name, width, weights) for name in FIXED}
    for each in rows.values():
        each.step()
    errors = {name: rows[name].error(rows[NONE]) for name in FIXED}
    rows = {**rows, "auto": auto}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(rounds):
        for name, row in shuffled(rows, number):
            dist.barrier()
            row.step()
            seconds[name] += [row.step() for _ in range(STEPS_PER_TURN)]
    wire = auto.wire
    assert wire is not None
    ms = {name: slowest(values, STEPS_PER_TURN) for name, values in seconds.items()}
    last = wire.decisions()[-1]
    return Found(ms, errors, str(wire), f"{last.counts}, {last.bytes_per_step:,} bytes")


def run(link: str, recipe: str, rounds: int, budget: float, weights: str | None) -> str:
    """Measure one link; return a line of the table."""
    first, _, then = link.partition(">")
    with contextlib.nullcontext() if first == "none" else Lab(2, first) as lab:

        def change(rank: int, message: object) -> None:
            assert lab is not None
            lab.set_rate(then)

        args = (recipe, WIDTHS.get(link, 128), rounds, bool(then), weights)
        found = run_ranks(measure, 2, TIMEOUT_S, args=args, lab=lab, on_message=change)[0]
    print(f"\n{link}: {found.decisions}")
    for name, values in found.ms.items():
        error = f"error {found.errors[name]:.3f}" if name in found.errors else ""
        print(f"  {name:22} {statistics.median(values):9.1f} ms   {error}")
    allowed = [name for name in FIXED if found.errors[name] <= budget]
    best = min(allowed, key=lambda name: statistics.median(found.ms[name]))
    median = {name: statistics.median(values) for name, values in found.ms.items()}
    return (
        f"| {link} | {median[NONE]:.1f} | `{best}` {median[best]:.1f} | {median['auto']:.1f} "
        f"| {1 / ratio(found.ms['auto'], found.ms[best], STEPS_PER_TURN):.2f} "
        f"| {ratio(found.ms[NONE], found.ms['auto'], STEPS_PER_TURN):.2f} | {found.last} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", default=LINKS, help="rates; none is loopback; a>b changes")
    parser.add_argument("--rounds", type=int, default=6, help=f"turns of {STEPS_PER_TURN} steps per row")
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--weights", help="shard the model by FSDP2, and gather its weights so")
    options = parser.parse_args()
    tuning = gradwire.recipe(options.recipe).tuning
    if tuning is None:
        parser.error(f"--recipe is auto, with options, not {options.recipe}")
    print(f"{Machine.here()}; 2 Gloo ranks, one thread each; torch {torch.__version__}", flush=True)
    lines = [
        run(link, options.recipe, options.rounds, tuning.budget, options.weights) for link in options.links
    ]
    plain = "DDP" if options.weights is None else "FSDP2"
    ratios = f"best fixed over auto | {plain} over auto"
    print(f"\n| link | {plain}, ms | best fixed, ms | auto, ms | {ratios} | chosen |")
    print("|---|---:|---:|---:|---:|---:|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
