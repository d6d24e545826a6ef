"""Random sharded models for `fuzz_sharded.py`, and the ways in which they are trained."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

WIDTH, NUM_WORDS = 12, 11


@dataclass(frozen=True)
class ShardedFuzz:
    """One case."""

    number: int
    seed: int
    num_replicas: int
    num_shards: int
    native: bool
    """Sharded over a mesh of two dimensions, if there are replicas; otherwise `attach` is told them."""
    recipe: str
    weights: str | None
    reshards: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offloads: bool
    accumulates: str
    """"each": micro-batches are reduced; "last": only the last one; "replicas": it alone is averaged."""
    num_micro: int
    divisor: float | None
    nested: bool
    compiled: bool
    recomputed: bool
    frozen: bool
    unused: str
    """What every other step leaves out: "none", "block" or "parameter"."""
    several_dtypes: bool
    evaluates: bool
    num_steps: int
    skewed: bool
    goes_on: str
    """After half of the steps: "never" stops, "same" is resumed, or another way to hold the parameters."""

    @property
    def world_size(self) -> int:
        return self.num_replicas * self.num_shards

    @property
    def has_replicas(self) -> bool:
        return self.num_replicas > 1 or self.native

    @property
    def later_grid(self) -> tuple[int, int]:
        """The replicas and shards on which a run goes on; without shards, each replica is a DDP model."""
        if self.goes_on == "DDP":
            return self.world_size, 0
        num_replicas, num_shards = map(int, self.goes_on.split("x"))
        return num_replicas, num_shards

    def traits(self) -> Sequence[str]:
        kind = "HSDP" if self.has_replicas else "FSDP2"
        flags = ("offloads", "nested", "compiled", "recomputed", "frozen", "several_dtypes", "skewed")
        return (
            kind,
            f"{self.world_size} ranks",
            f"{kind}, {self.recipe.partition(':')[0].partition('(')[0]}",
            f"weights={(self.weights or 'torch').partition(':')[0]}",
            f"reshards={self.reshards}",
            f"dtypes {str(self.param_dtype)[6:] or 'own'}/{str(self.reduce_dtype)[6:] or 'own'}",
            f"accumulates {self.accumulates}" if self.num_micro > 1 else "accumulates nothing",
            f"unused: {self.unused}",
            f"goes on: {self.goes_on}",
            *(flag for flag in flags if getattr(self, flag)),
        )


def draw_recipe(choice: random.Random, *, has_replicas: bool, may_route: bool) -> str:
    """Draw a recipe of values; between replicas also with feedback, and of low rank."""
    blocks = f"block={choice.choice([64, 512])},rounding={choice.choice(['nearest', 'stochastic'])}"
    plain = [
        "fp32",
        "bf16",
        "fp16",
        f"int8:{blocks}",
        f"fp8:{blocks}",
        "int4",
        f"int4:{blocks}",
        "int4:rotated=true",
        "sign:tables=same",
        "sign:tables=same,rotated=false",
        "int2:tables=same",
    ]
    if has_replicas:
        low_rank = f"rank={choice.choice([1, 2, 4])},start={choice.choice([0, 1, 2])}"
        plain += [f"powersgd:{low_rank}", f"acp:{low_rank}", f"int8:{blocks},feedback=true", "topk"]
        plain += ["sign:feedback=true", "sign:feedback=true,rotated=false", "sign", "int2"]

    def one() -> str:
        return choice.choice(plain)

    routed = f"route(ndim<2=fp32; *.up.*={one()}; *={one()})"
    return choice.choice(
        [one(), one(), one(), f"schedule(0={one()}; 2={one()})", routed if may_route else one()]
    )


def draw(seed: int, number: int) -> ShardedFuzz:
    choice = random.Random(f"{seed} {number}")

    def maybe(chance: float) -> bool:
        return choice.random() < chance

    num_replicas, num_shards = choice.choice(
        [(1, 2), (1, 3), (1, 4), (1, 4), (2, 2), (2, 2), (2, 1), (4, 1), (3, 1), (1, 2)]
    )
    native = num_replicas > 1 and maybe(0.5)
    has_replicas = num_replicas > 1
    param_dtype, reduce_dtype = choice.choice(
        [(None, None)] * 3
        + [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (None, torch.bfloat16)]
    )
    unused = choice.choice(["none", "none", "block", "parameter"])
    frozen = maybe(0.3)
    may_route = not frozen and (has_replicas or unused != "parameter")  # of which a route may take none
    accumulates = choice.choice(["each", "last", *(["replicas"] if has_replicas else [])])
    others = {2: [(1, 2), (2, 1)], 3: [(1, 3), (3, 1)], 4: [(1, 4), (2, 2), (4, 1)]}
    elsewhere = ["DDP", *(f"{r}x{s}" for r, s in others[num_replicas * num_shards])]
    case = ShardedFuzz(
        number=number,
        seed=seed,
        num_replicas=num_replicas,
        num_shards=num_shards,
        native=native,
        recipe=draw_recipe(choice, has_replicas=has_replicas, may_route=may_route),
        weights=choice.choice([None, "fp32", "fp32", "int8", "bf16", "int4"]),
        reshards=maybe(0.5),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        offloads=maybe(0.1),
        accumulates=accumulates,
        num_micro=choice.choice([1, 1, 2, 3]),
        divisor=choice.choice([None] * 6 + [0.5, 3.0]),
        nested=maybe(0.3),
        compiled=maybe(0.06),
        recomputed=maybe(0.2),
        frozen=frozen,
        unused=unused,
        several_dtypes=param_dtype is None and reduce_dtype is None and maybe(0.3),
        evaluates=maybe(0.3),
        num_steps=50 if maybe(0.03) else choice.randint(3, 6),
        skewed=maybe(0.3),
        goes_on=choice.choice(["never", "never", "same", "same", *elsewhere]),
    )
    if case.divisor is not None and (num_shards == 1 or case.goes_on.endswith("x1")):
        case = replace(case, several_dtypes=False)  # with one shard, torch divides gradients of fp64 twice
    return case


class Block(nn.Module):
    """Matrices of odd sizes, a norm, and a vector with fewer values than ranks that some steps leave out."""

    def __init__(self, choice: random.Random, inner: nn.Module | None) -> None:
        super().__init__()
        size = choice.choice([1, 3, 16, 130])
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, size, bias=choice.random() < 0.5)
        self.inner = inner
        self.down = nn.Linear(size, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.tensor([0.5]))
        self.conv = nn.Conv2d(3, 3, 2, padding="same") if choice.random() < 0.5 else None

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        hidden = self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype)
        out = self.down(torch.tanh(self.up(hidden))).float()
        if self.conv is not None:
            out = out + self.conv(x.to(self.conv.weight.dtype).view(-1, 3, 2, 2)).flatten(1).float()
        if uses_all:
            out = out * self.gain.float()
        if self.inner is not None:
            out = self.inner(out, uses_all)
        added: Tensor = x.float() + out
        return added


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, case: ShardedFuzz) -> None:
        super().__init__()
        choice = random.Random(f"model {case.seed} {case.number}")
        self.table = nn.Embedding(NUM_WORDS, WIDTH)
        blocks = [
            Block(choice, Block(choice, None) if case.nested else None) for _ in range(choice.randint(1, 3))
        ]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 5)
        for block in blocks:
            if case.several_dtypes:
                block.to(choice.choice([torch.float32, torch.bfloat16, torch.float64]))
            for parameter in block.parameters():
                if case.frozen and choice.random() < 0.3:
                    parameter.requires_grad_(False)
        self._unused = case.unused

    def forward(self, words: Tensor, step: int) -> Tensor:
        uses_all = self._unused == "none" or step % 2 == 0
        x = self.table(words).float()
        for number, block in enumerate(self.blocks):
            if uses_all or self._unused != "block" or number:
                x = block(x, uses_all or self._unused != "parameter")
        logits: Tensor = self.head(x.to(self.head.weight.dtype)).float()
        return logits
