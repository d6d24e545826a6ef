"""Average random tensors in random ways by random recipes, and hold the results to the laws of averaging.

    python benchmarks/fuzz_averager.py --cases 2000 --jobs 4     2000 cases, on 4 groups of ranks at a time
    python benchmarks/fuzz_averager.py --seed 1 --only 17        one of them again

A case is drawn from the seed and its number: a recipe, 2 to 5 ranks, lists and dicts of tensors of all
dtypes and strides. Each of its calls is an average, with or without weights, by handles that overlap and are
waited for in any order, a reduce-scatter and an all-gather, a swap to another recipe, or a state that another
averager goes on from. Some averagers are closed with handles under way. After each call:

- results and what ranks hold back are, summed over calls, the exact means, within the recipe's bound;
- every rank has the same bits, and memory between the values of a tensor is as it was;
- a state, loaded by another averager, gives the bits of the first.
"""

import copy
import random
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from campaign import run_campaign
from fuzz_models import draw_recipe

CASE_S = 60.0
WORLD_SIZES = (2, 3, 4, 5)
DTYPES = (
    torch.float32,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.float8_e5m2,
)
# The rounding of a dtype, beside that of the recipe, relative to the largest value of any rank.
UNITS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float8_e5m2: 0.25}
# The errors of recipes without feedback: one rounding of each rank's values, and one of their sum.
ERRORS = {"fp32": 1e-5, "bf16": 2.0**-7, "fp16": 2.0**-10, "int8": 2.1 / 127, "fp8": 2.1 / 8, "int4": 2.1 / 7}
CALLS = ("average", "average", "handles", "handles", "weighted", "scatter", "swap", "state")


@dataclass(frozen=True)
class AveragerFuzz:
    """One case."""

    number: int
    seed: int
    world_size: int
    recipes: tuple[str, ...]
    """The first one, and those that are swapped to."""
    has_names: bool
    calls: tuple[str, ...]
    skewed: bool
    closes: bool
    """The averager is closed while handles are under way."""

    def traits(self) -> Sequence[str]:
        name = self.recipes[0].partition(":")[0].partition("(")[0]
        flags = (flag for flag in ("skewed", "closes", "has_names") if getattr(self, flag))
        return (f"{self.world_size} ranks", name, *sorted(set(self.calls)), *flags)


def draw(seed: int, number: int) -> AveragerFuzz:
    choice = random.Random(f"{seed} {number}")
    world_size = choice.choice(WORLD_SIZES)
    calls = tuple(choice.choice(CALLS) for _ in range(choice.randint(3, 8)))

    def recipe() -> str:
        plain = choice.choice(["fp32", "int8", "fp8", "int4", "int4:feedback=false", "topk"])
        return choice.choice([plain, draw_recipe(choice, world_size)])

    return AveragerFuzz(
        number=number,
        seed=seed,
        world_size=world_size,
        recipes=tuple(recipe() for _ in range(1 + calls.count("swap"))),
        has_names=choice.random() < 0.7,
        calls=calls,
        skewed=choice.random() < 0.3,
        closes=choice.random() < 0.2,
    )


@dataclass(frozen=True)
class Kind:
    """A tensor of every call: its name, dtype, shape, and the way in which it lies in memory."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    lies: str

    def draw(self, rank: int, call: int) -> tuple[Tensor, Tensor]:
        """Return one rank's tensor of one call, and the memory in which it lies."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {rank} {call}".encode()))
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        values = torch.randn(self.sizes, generator=generator, dtype=wide)
        rows, columns = (*self.sizes, 1, 1)[:2]
        if self.lies == "transposed" and len(self.sizes) == 2:
            memory = torch.full((columns, rows), 7.0).to(self.dtype)
            view = memory.t()
        elif self.lies == "strided" and len(self.sizes) == 2:
            memory = torch.full((rows, 2 * columns + 1), 7.0).to(self.dtype)
            view = memory[:, 1::2]
        else:
            memory = view = torch.empty(self.sizes, dtype=self.dtype)
        view.copy_(values)
        return view, memory


def draw_kinds(case: AveragerFuzz) -> list[Kind]:
    choice = random.Random(f"kinds {case.seed} {case.number}")
    sizes = [(), (1,), (0, 3), (37,), (37, 41), (130, 3), (5, 1, 7), (200, 65)]
    ways = ["plain", "transposed", "strided"]
    drawn = [(choice.choice(DTYPES), choice.choice(sizes), choice.choice(ways)) for _ in range(6)]
    plain = [(torch.float32, (64, 24), "plain"), (torch.float32, (24,), "plain")]
    kinds = [*drawn[: choice.randint(1, 6)], *plain]
    return [
        Kind(f"block.{number}" if case.has_names else str(number), *kind) for number, kind in enumerate(kinds)
    ]


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


class Laws:
    """Sums over calls of what was due, less what was sent; and the errors that they may have."""

    def __init__(self, kinds: list[Kind]) -> None:
        self.deviation = 0.0
        self._kinds = kinds
        self._missing: dict[str, Tensor] = {}
        self._allowed: dict[str, float] = {}

    def add(
        self, averager: gradwire.Averager, call: int, have: dict[str, Tensor], weights: list[float]
    ) -> None:
        """Add the results of a call, and check that nothing is lost; collective."""
        held, error = held_back(averager), error_of(averager.recipe)
        everyone: list[Any] = [None] * len(weights)
        dist.all_gather_object(everyone, {name: widened(each) for name, each in have.items()})
        own = {
            kind.name: [widened(kind.draw(rank, call)[0]) for rank in range(len(weights))]
            for kind in self._kinds
        }
        largest = max(float(each.abs().max()) for row in own.values() for each in row if each.numel())
        largest += max([0.0, *(float(each.abs().max()) for each in held.values() if each.numel())])
        for kind in self._kinds:
            name, found = kind.name, have[kind.name]
            where = f"call {call}: {name}, {kind.dtype}, shape {kind.sizes}"
            assert all(torch.equal(each[name], widened(found)) for each in everyone), f"{where}: ranks differ"
            due = sum(w * each for w, each in zip(weights, own[name], strict=True)) / sum(weights)
            self._missing[name] = self._missing.get(name, 0) + due - widened(found)
            unit = UNITS.get(kind.dtype, 0.0)
            self._allowed[name] = self._allowed.get(name, 0.0) + (unit + error) * largest
            if found.numel():
                off = self._missing[name] - (held[name].reshape(kind.sizes) if name in held else 0)
                part = float(off.abs().max()) / self._allowed[name]
                self.deviation = max(self.deviation, part)
                assert part <= 1, f"{where}: off by {part:.3g} of what is allowed"


def has_feedback(recipe: gradwire.Recipe) -> bool:
    return getattr(recipe.exchange, "feedback", None) not in (None, False)


def error_of(recipe: gradwire.Recipe) -> float:
    """Return the error of one call; what a recipe with feedback leaves out is known, and counted."""
    lossy = [each for each in recipe.leaves() if not has_feedback(each)]
    return max([2e-3, *(ERRORS[each.name.partition(":")[0]] for each in lossy)])


def held_back(averager: gradwire.Averager) -> dict[str, Tensor]:
    """Return the mean over ranks of what they hold back; collective."""
    own: dict[str, Tensor] = {}
    for states in averager.state_dict()["memory"].values():
        for key, tensors in states.items():
            if key.startswith("residual:"):
                for name, values in tensors.items():
                    own[name] = own.get(name, 0) + widened(values)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: sum(each[name] for each in everyone) / len(everyone) for name in own}


def average(
    averager: gradwire.Averager,
    case: AveragerFuzz,
    tensors: dict[str, Tensor],
    way: str,
    weight: float | None,
) -> None:
    """Average at once, or by handles that are waited for in an order of this rank's own."""
    given: Any = tensors if case.has_names else list(tensors.values())
    if way != "handles":
        averager.average_(given, weight)
        return
    parts = [{name: tensor} for name, tensor in tensors.items()] if case.has_names else [given]
    handles = [averager.start(part) for part in parts]
    random.Random(dist.get_rank()).shuffle(handles)
    for handle in handles:
        handle.wait()


def check(rank: int, case: AveragerFuzz) -> float:
    """Average in the way of ``case``, inside a rank; return the largest error, of that which is allowed."""
    kinds, pauses = draw_kinds(case), random.Random(rank)
    laws, recipes = Laws(kinds), list(case.recipes)
    averager = gradwire.Averager(recipes.pop(0))
    for number, call in enumerate(case.calls):
        if case.skewed:
            time.sleep(pauses.random() * 0.02)
        if call == "swap":
            averager.swap(recipes.pop(0))
        elif call == "scatter":
            check_halves(averager, case, rank, number)
        else:
            drawn = {kind.name: kind.draw(rank, number) for kind in kinds}
            before = {name: memory.clone() for name, (_, memory) in drawn.items()}
            tensors = {name: tensor for name, (tensor, _) in drawn.items()}
            weights = [1.0] * case.world_size
            if (
                call == "weighted"
                and not held_back(averager)
                and not any(map(has_feedback, averager.recipe.leaves()))
            ):
                weights = [float(each * (each != 1)) + 0.5 * (each == 0) for each in range(case.world_size)]
            twin = None
            if call == "state":
                twin = gradwire.Averager(averager.recipe)
                twin.load_state_dict(averager.state_dict())
                copies = copy.deepcopy(tensors)
                twin.average_(copies if case.has_names else list(copies.values()))
            average(averager, case, tensors, call, weights[rank] if set(weights) != {1.0} else None)
            if twin is not None:
                for name, tensor in tensors.items():
                    assert torch.equal(copies[name].float(), tensor.float()), (
                        f"{name}: a state gives other bits"
                    )
                averager.close()
                averager = twin
            laws.add(averager, number, {name: tensor.clone() for name, tensor in tensors.items()}, weights)
            for name, (tensor, memory) in drawn.items():
                tensor.copy_(kind_of(kinds, name).draw(rank, number)[0])
                assert torch.equal(memory.float(), before[name].float()), (
                    f"{name}: memory beside it has changed"
                )
    if case.closes:
        check_close(averager, {kind.name: kind.draw(rank, 99)[0] for kind in kinds})
    averager.close()
    return laws.deviation


def kind_of(kinds: list[Kind], name: str) -> Kind:
    return next(kind for kind in kinds if kind.name == name)


def check_halves(averager: gradwire.Averager, case: AveragerFuzz, rank: int, number: int) -> None:
    """Reduce-scatter and gather a flat tensor, if the recipe can."""
    kind = Kind("flat", random.Random(number).choice(DTYPES[:5]), (1001,), "plain")
    flat, _ = kind.draw(rank, number)
    try:
        shard = averager.reduce_scatter(flat)
        found = averager.all_gather(shard, numel=1001)
    except ValueError as refusal:
        if "reduce-scatter" in str(refusal):
            return
        raise
    everyone: list[Any] = [None] * case.world_size
    dist.all_gather_object(everyone, found)
    assert all(torch.equal(each, found) for each in everyone), f"call {number}: ranks differ"
    own = torch.stack([widened(kind.draw(each, number)[0]) for each in range(case.world_size)])
    allowed = max(error_of(averager.recipe), 0.35 if "int4" in str(averager.recipe) else 0) + UNITS.get(
        kind.dtype, 0.0
    )
    error = float((widened(found) - own.mean(0)).abs().max() / own.abs().max())
    assert error <= allowed, f"call {number}: a chunk is off by {error:.3g} of {allowed:.3g}"


def check_close(averager: gradwire.Averager, tensors: dict[str, Tensor]) -> None:
    """Close an averager with handles under way: each of them raises."""
    handles = [averager.start({name: tensor}) for name, tensor in tensors.items()]
    averager.close()
    for handle in handles:
        with pytest.raises(RuntimeError, match="closed"):
            handle.wait()


if __name__ == "__main__":
    sys.exit(run_campaign(__doc__ or "", draw, check, CASE_S))
