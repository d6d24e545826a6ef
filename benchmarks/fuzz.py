"""Train random models in random ways by random recipes, and hold the results to the laws of averaging.

    python benchmarks/fuzz.py --cases 2000 --jobs 4        2000 cases, on 4 groups of ranks at a time
    python benchmarks/fuzz.py --seed 1 --only 17           one of them again

A case is drawn from the seed and its number: models (dtypes, shapes, strides, tied, frozen, unused, sparse,
lazily made), options of DistributedDataParallel, a recipe, 2 to 7 ranks, accumulation, uneven inputs,
compilation. After each case, over all its steps:

- every rank has the same gradients, bit for bit;
- the sum of the averaged gradients, and of what ranks hold back, is the sum of the exact means, up to
  rounding;
- a parameter has a gradient if and only if it has one without gradwire;
- the wire has counted the steps.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import hashlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from fuzz_models import NUM_WORDS, WIDTH, Way, draw
from gradwire.headroom import Machine
from gradwire.ranks import time_limit
from gradwire.testing import RanksFailed, run_ranks, send_message

WORLD_SIZES = range(2, 8)
CASE_S = 60.0
# The largest error of a sum over steps, relative to the largest value of its parameter: of the sum of exact
# gradients, or of an average, which has what was held back before and may be larger.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.complex64: 1e-4, torch.bfloat16: 0.05}
ROUNDED = {"bf16": 0.02, "fp16": 0.004}


def batch(rank: int, step: int, turn: int) -> tuple[Tensor, Tensor, int]:
    """Return one input, different on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + turn)
    words = torch.randint(NUM_WORDS, (4,), generator=generator)
    return torch.randn(4, WIDTH, generator=generator), words, step + rank


def num_steps(way: Way, rank: int) -> int:
    """Return the number of steps of a rank; with uneven inputs, rank 0 has the most."""
    return way.num_steps + (way.world_size - rank if way.joins else 0)


def accumulate(totals: dict[str, Tensor], model: nn.Module) -> None:
    """Add the present gradients to the totals, as dense fp64 values."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            values = torch.view_as_real(dense) if dense.is_complex() else dense
            totals[name] = totals.get(name, 0) + values.detach().double()


def train_alone(model: nn.Module, way: Way, rank: int) -> dict[str, Tensor]:
    """Return the sums of this rank's own gradients over all steps."""
    totals: dict[str, Tensor] = {}
    for step in range(num_steps(way, rank)):
        model.zero_grad()
        for turn in range(way.num_accumulated):
            model(*batch(rank, step, turn)).backward()
        accumulate(totals, model)
    return totals


@dataclasses.dataclass
class Averages:
    """The averaged gradients of a model, by parameter."""

    sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    peaks: dict[str, float] = dataclasses.field(default_factory=dict)
    """The largest magnitude of any step."""

    def add(self, model: nn.Module) -> None:
        """Add those of a step."""
        own: dict[str, Tensor] = {}
        accumulate(own, model)
        for name, values in own.items():
            self.sums[name] = self.sums.get(name, 0) + values
            peak = values.abs().max().item() if values.numel() else 0.0
            self.peaks[name] = max(self.peaks.get(name, 0.0), peak)


def train_together(models: list[Any], way: Way, rank: int) -> list[Averages]:
    """Train all models side by side; return their averages over all steps."""
    found = [Averages() for _ in models]
    ddps = [each._orig_mod if way.compiles else each for each in models]
    with contextlib.ExitStack() as stack:
        if way.joins:
            for ddp in ddps:
                stack.enter_context(ddp.join())
        for step in range(num_steps(way, rank)):
            for model, ddp, averages in zip(models, ddps, found, strict=True):
                ddp.zero_grad()
                for turn in range(way.num_accumulated):
                    is_last = turn == way.num_accumulated - 1
                    with contextlib.nullcontext() if is_last else ddp.no_sync():
                        model(*batch(rank, step, turn)).backward()
                averages.add(ddp.module)
    return found


def check_case(rank: int, seed: int, number: int) -> None:
    """Run one case, and raise AssertionError with what is wrong."""
    size = dist.get_world_size()
    way, make = draw(seed, number, size)
    if way.joins and way.num_models > 1:  # nested joins would interleave
        way = Way(**{**vars(way), "num_models": 1})
    nets = make()[: way.num_models]
    twins = copy.deepcopy(nets)
    ddps = [DistributedDataParallel(net, **way.options) for net in nets]
    wires = [gradwire.attach(ddp, way.recipe) for ddp in ddps]
    models: list[Any] = [torch.compile(ddp, backend="eager") for ddp in ddps] if way.compiles else ddps
    averages = train_together(models, way, rank)
    for twin, net, wire, sent in zip(twins, nets, wires, averages, strict=True):
        own = train_alone(twin, way, rank)
        steps = wire.stats().num_steps
        assert steps == num_steps(way, 0), f"{steps} steps counted, of {num_steps(way, 0)}"
        held = held_back(wire)
        problems = []
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                problems += check_parameter(name, parameter, own, sent, held, way, rank)
        everyone: list[list[str]] = [[] for _ in range(size)]
        dist.all_gather_object(everyone, problems)
        found = [text for each in everyone for text in each]
        assert not found, "; ".join(found[:5])
        wire.detach()


def held_back(wire: gradwire.Wire) -> dict[str, Tensor]:
    """Return what this rank holds back, by parameter."""
    held: dict[str, Tensor] = {}
    for memory in wire.state_dict()["memory"].values():
        for key, tensors in memory.items():
            if key.startswith("residual:"):
                for name, values in tensors.items():
                    real = torch.view_as_real(values) if values.is_complex() else values
                    held[name] = held.get(name, 0) + real.double()
    return held


def check_parameter(
    name: str,
    parameter: nn.Parameter,
    own: dict[str, Tensor],
    sent: Averages,
    held: dict[str, Tensor],
    way: Way,
    rank: int,
) -> list[str]:
    """Return what is wrong with one parameter's sums; collective."""
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    zeros = torch.zeros_like(values, dtype=torch.float64)
    exact, back = own.get(name, zeros).clone(), held.get(name, zeros).clone().reshape(zeros.shape)
    largest = exact.abs().max() if exact.numel() else zeros.sum()
    used = torch.tensor(float(name in own))
    for tensor in (exact, back):
        dist.all_reduce(tensor)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    found = sent.sums.get(name, zeros)
    digest = hashlib.blake2b(found.contiguous().numpy().tobytes()).hexdigest()
    digests = [""] * way.world_size
    dist.all_gather_object(digests, digest)
    problems = []
    if not way.joins and len(set(digests)) > 1:
        problems.append(f"{name}: ranks differ")
    if rank == 0 and (name in sent.sums) != bool(used):
        problems.append(
            f"{name}: {'a' if name in sent.sums else 'no'} gradient, of {int(used)} ranks that used it"
        )
    if rank == 0 and exact.numel():  # with uneven inputs, rank 0 has seen all steps
        error = (found + back / way.world_size - exact / way.world_size).abs().max()
        limit = tolerance(parameter.dtype, way) * max(float(largest), sent.peaks.get(name, 0.0), 1e-6)
        if not error <= limit:
            problems.append(
                f"{name} {tuple(parameter.shape)} {parameter.dtype}: off by {error:.3g} of {limit:.3g}"
            )
    return problems


def tolerance(dtype: torch.dtype, way: Way) -> float:
    """Return the error that is allowed, relative to a parameter's largest value."""
    own = TOLERANCES.get(dtype, 0.01)
    return max([own, *(each for name, each in ROUNDED.items() if name in way.recipe)]) * way.num_steps


def run_cases(rank: int, seed: int, numbers: list[int], deadline: float) -> None:
    """Run these cases one after the other, up to a deadline; tell the parent of each that passes."""
    for number in numbers:
        late = torch.tensor(int(time.time() > deadline))
        dist.all_reduce(late)
        if late:
            return
        with time_limit(CASE_S):
            check_case(rank, seed, number)
        if rank == 0:
            send_message(number)


def run_world(seed: int, world_size: int, numbers: list[int], deadline: float) -> tuple[int, dict[int, str]]:
    """Run cases on new ranks, again after each failure; return how many ran, and the texts of failures."""
    failures: dict[int, str] = {}
    left = collections.deque(numbers)
    while left and time.time() < deadline:
        error = run_until_failure(seed, world_size, left, deadline)
        if error is not None:
            number = left.popleft()
            way, _ = draw(seed, number, world_size)
            failures[number] = f"case {number}: {way}\n{_telling(error)}"
            print(failures[number], flush=True)
    return len(numbers) - len(left), failures


def run_until_failure(
    seed: int, world_size: int, left: collections.deque[int], deadline: float
) -> RanksFailed | None:
    """Run the cases that are left, and remove those that pass; return the error of the first that fails."""
    try:
        run_ranks(
            run_cases,
            world_size,
            timeout=CASE_S * len(left),
            args=(seed, list(left), deadline),
            on_message=lambda *_: left.remove(left[0]),
        )
    except RanksFailed as error:
        return error
    return None


def _telling(error: RanksFailed) -> str:
    """Return the last lines of each rank's error."""
    ends = (" | ".join(text.strip().splitlines()[-2:])[:400] for text in error.errors.values())
    return "\n".join(f"  {end}" for end in dict.fromkeys(ends))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="groups of ranks at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so long")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="run these cases")
    options = parser.parse_args()
    numbers = options.only or range(options.cases)
    # One group of ranks for up to 25 cases: case n runs on 2 + n % 6 ranks.
    worlds: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        size = WORLD_SIZES[number % len(WORLD_SIZES)]
        worlds.setdefault((size, number // (25 * len(WORLD_SIZES))), []).append(number)
    begin = time.time()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        ordered = sorted(worlds.items(), key=lambda each: (each[0][1], -each[0][0]))
        end = begin + options.seconds
        runs = [pool.submit(run_world, options.seed, size, cases, end) for (size, _), cases in ordered]
        results = [run.result() for run in runs]
    num_cases = sum(number for number, _ in results)
    num_wrong = sum(len(failures) for _, failures in results)
    took_s = time.time() - begin
    print(
        f"{Machine.here()}; torch {torch.__version__}; seed {options.seed}: {num_cases} cases, "
        f"{num_wrong} wrong; {took_s:.0f} s"
    )
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
