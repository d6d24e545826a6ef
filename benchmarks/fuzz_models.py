"""Random models for `fuzz.py`: parameters of all kinds, used in all ways."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 12
NUM_WORDS = 9
RESUME = "resume"
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Matrices(nn.Module):
    """A product of two matrices of one dtype, row by row or column by column in memory."""

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        dtype, inner = choice.choice(DTYPES), choice.choice([1, 3, 16, 130])
        first, second = torch.randn(WIDTH, inner) / 4, torch.randn(inner, WIDTH) / 4
        if choice.random() < 0.3:
            first = first.t().contiguous().t()
        self.first, self.second = nn.Parameter(first.to(dtype)), nn.Parameter(second.to(dtype))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return x @ self.first.float() @ self.second.float()


class Scales(nn.Module):
    """Parameters of one dimension, of none, and without values."""

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH).to(choice.choice(DTYPES)))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3)) if choice.random() < 0.3 else None

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        nothing = 0.0 if self.nothing is None else self.nothing.sum()
        return x * self.scale.float() * self.factor + nothing


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return (x * self.turn).real


class Words(nn.Module):
    """An embedding, with sparse or dense gradients."""

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, WIDTH, sparse=choice.random() < 0.5)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.table(words)
        return x + found


class Images(nn.Module):
    """A convolution, with channels first or last in memory, and a norm."""

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 2, padding="same"), nn.LayerNorm(WIDTH)
        if choice.random() < 0.5:
            self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.conv(x.view(-1, 3, 2, 2)).flatten(1))
        return normed


class Lazy(nn.Module):
    """A layer whose parameters are made by a first forward pass."""

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(WIDTH)
        self.layer(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


PARTS = (Matrices, Matrices, Scales, Complex, Words, Images, Lazy)


class RandomModel(nn.Module):
    """A sum of random parts, some frozen, some tied, some used in some steps on some ranks only."""

    def __init__(self, choice: random.Random, *, may_have_unused: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(choice.choice(PARTS)(choice) for _ in range(choice.randint(1, 4)))
        always = Matrices(choice)  # so that one parameter has a gradient in every step
        self.parts.append(always)
        if choice.random() < 0.3:
            self.tied = Matrices(choice)
            self.tied.second = always.second
            self.tied.first = nn.Parameter(torch.randn(WIDTH, self.tied.second.shape[0]))
            self.parts.append(self.tied)
        self.offset = nn.Parameter(torch.tensor(0.5))
        # DDP refuses a sparse gradient that is missing.
        self.rare = [
            may_have_unused and choice.random() < 0.4 and not isinstance(part, Words)
            for part in self.parts[:-2]
        ]
        for part in self.parts[:-2]:
            for parameter in part.parameters():
                if choice.random() < 0.15 and parameter.numel():
                    parameter.requires_grad_(False)

    def forward(self, x: Tensor, words: Tensor, turn: int) -> Tensor:
        total = self.offset.square()
        for number, part in enumerate(self.parts):
            is_rare = number < len(self.rare) and self.rare[number]
            if not is_rare or (turn + number) % 3 == 0:
                total = total + part(x, words).square().mean()
        return total


@dataclass(frozen=True)
class Way:
    """The way in which a case trains its models."""

    world_size: int
    recipe: str
    options: dict[str, Any]
    """The options of DistributedDataParallel."""
    num_models: int
    num_steps: int
    num_accumulated: int
    joins: bool
    compiles: bool
    change: str
    """The recipe to swap to, or `RESUME`; empty for neither."""
    changes_at: int

    @property
    def family(self) -> str:
        """The recipe without its options."""
        return re.split(r"[:(]", self.recipe)[0]

    def __str__(self) -> str:
        return (
            f"{self.world_size} ranks, {self.num_models} model(s), {self.recipe}, {self.options}, "
            f"{self.num_steps} steps of {self.num_accumulated}, "
            f"{'join, ' if self.joins else ''}{'compiled, ' if self.compiles else ''}"
            f"{f'{self.change} at step {self.changes_at}' if self.change else ''}"
        )


def draw_recipe(choice: random.Random, world_size: int) -> str:
    """Draw a recipe that is exact, rounds, or has error feedback; alone, in a route or a schedule."""
    blocks = f"block={choice.choice([64, 128, 512])},rounding={choice.choice(['nearest', 'stochastic'])}"
    low_rank = f"rank={choice.choice([1, 2, 4])},start={choice.choice([0, 1, 2])}"
    low_rank += choice.choice(["", ",factors=int4", ",factors=int8"])
    nodes = choice.choice([f"local_size={size}" for size in (1, 1, 2, 3) if world_size % size == 0])
    exact = ("fp32", "bf16", "fp16")
    few_bits = [f"{name}:{blocks},{nodes},feedback=true" for name in ("int8", "fp8", "int4")]
    one_bit = f"sign:{nodes},feedback=true,rotated={choice.choice(['true', 'false'])}"
    few_values = [one_bit, f"int4:{nodes},rotated=true", f"topk:keep=8,block=256,{nodes}"]

    def plain() -> str:
        return choice.choice([*exact, *few_bits, *few_values, f"powersgd:{low_rank}", f"acp:{low_rank}"])

    return choice.choice(
        [plain(), plain(), plain(), f"route(ndim<2=fp32; *={plain()})", f"schedule(0={plain()}; 2={plain()})"]
    )


def draw(seed: int, number: int, world_size: int) -> tuple[Way, Callable[[], list[nn.Module]]]:
    """Draw a case; return its way, and a function that makes its models, the same on all ranks."""
    choice = random.Random(f"{seed} {number}")
    compiles = choice.random() < 0.03
    graph = choice.choice([{}, {}, {"find_unused_parameters": True}, {"static_graph": True}])
    options: dict[str, Any] = {
        "bucket_cap_mb": 25 if compiles else choice.choice([0.0005, 0.005, 25]),  # compilers refuse few
        "gradient_as_bucket_view": choice.random() < 0.5,
        **graph,
    }
    has_sparse_views = options["gradient_as_bucket_view"]
    joins = choice.random() < 0.2 and "static_graph" not in options
    num_steps = choice.randint(3, 6)
    change = "" if joins else choice.choice(["", "", RESUME, draw_recipe(choice, world_size)])
    way = Way(
        world_size,
        draw_recipe(choice, world_size),
        options,
        1 if joins else choice.choice([1, 1, 1, 2]),  # nested joins would interleave
        num_steps,
        1 if "static_graph" in options else choice.choice([1, 1, 2]),  # DDP cannot do both
        joins,
        compiles,
        change,
        choice.randrange(1, num_steps),
    )
    models_seed = choice.random()

    def make() -> list[nn.Module]:
        torch.manual_seed(number)
        inner = random.Random(models_seed)
        made: list[nn.Module] = []
        for _ in range(way.num_models):
            model = RandomModel(inner, may_have_unused="find_unused_parameters" in options)
            if has_sparse_views:  # DDP refuses sparse gradients as views of buckets
                for part in model.modules():
                    if isinstance(part, nn.Embedding):
                        part.sparse = False
            made.append(model)
        return made

    return way, make


def kinds(way: Way, models: list[nn.Module]) -> list[str]:
    """Return the kinds of case that a case is of."""
    parts = [part for model in models for part in model.modules()]
    parameters = [parameter for model in models for parameter in model.parameters()]
    found = {
        "several dtypes": len({each.dtype for each in parameters}) > 1,
        "complex parameters": any(isinstance(part, Complex) for part in parts),
        "sparse embeddings": any(isinstance(part, nn.Embedding) and part.sparse for part in parts),
        "frozen parameters": not all(each.requires_grad for each in parameters),
        "tied parameters": any(hasattr(model, "tied") for model in models),
        "unused parameters": any(any(each.rare) for each in parts if isinstance(each, RandomModel)),
        "lazily made layers": any(isinstance(part, Lazy) for part in parts),
        "`static_graph`": "static_graph" in way.options,
        "several models": way.num_models > 1,
        "accumulation": way.num_accumulated > 1,
        "uneven inputs": way.joins,
        "compiled": way.compiles,
        "resumed": way.change == RESUME,
        "swapped": way.change not in ("", RESUME),
    }
    return [name for name, is_so in found.items() if is_so]
