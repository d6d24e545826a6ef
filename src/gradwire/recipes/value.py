"""The recipe value: an exchange under a name, and the bytes that it sends."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from gradwire.buckets import BucketLayout, Slot
from gradwire.exchanges import Exchange, Links, Selector
from gradwire.recipes.tuning import Tuning

Reduction = Literal["mean", "sum"]
Tables = Literal["same", "fp32", "bf16", "int8", "int4"]


@dataclass(frozen=True)
class Recipe:
    """A way to average a bucket: an exchange with its codec, to a mean or a sum.

    Make one by a factory such as `bf16`, or from text by `recipe`.

    >>> from gradwire.recipes import bf16
    >>> bf16().exchange
    TwoShot(codec=Cast(dtype=torch.bfloat16), feedback=None, seed=0, momentum=0.0)
    """

    name: str
    """The text from which `recipe` makes this recipe: a name, and the options that are not defaults."""
    exchange: Exchange
    reduction: Reduction = "mean"
    local_size: int | None = None
    """Ranks in a node, for an exchange in two levels; 1 for one level; None for what the launcher gives."""
    tables: Tables = "same"
    """The recipe for embedding tables, whose gradients this one would lose; "same" for this one."""
    parts: tuple[tuple[int | Selector, Recipe], ...] = field(default=(), repr=False)
    """The recipes of a schedule by first step, or of a route by selector; empty for any other recipe."""
    tuning: Tuning | None = field(default=None, repr=False)
    """The options of ``auto``, which changes its exchange while it runs; None for a recipe that does not."""

    def __post_init__(self) -> None:
        if self.reduction not in typing.get_args(Reduction):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {self.reduction!r}")
        if self.tables not in typing.get_args(Tables):
            allowed = ", ".join(map(repr, typing.get_args(Tables)))
            raise ValueError(f"tables must be one of {allowed}, not {self.tables!r}")

    def __str__(self) -> str:
        return self.name

    @property
    def momentum(self) -> float:
        """The momentum that ranks apply before they send, so that an optimizer must have none; 0 if none."""
        return max(getattr(each.exchange, "momentum", 0.0) for each in self.leaves())

    def leaves(self) -> Iterator[Recipe]:
        """Yield the recipes that this one is composed of; if it has no parts, yield itself."""
        if not self.parts:
            yield self
        for _, each in self.parts:
            yield from each.leaves()

    def link_bytes(
        self, numel: int, dtype: torch.dtype = torch.float32, *, rank: int = 0, world_size: int
    ) -> Links:
        """Return `wire_bytes`, split into those to ranks of the same node and those to other nodes.

        A recipe in one level does not know its nodes: all of its bytes count as sent to other nodes.

        >>> from gradwire.recipes import int8
        >>> int8(local_size=8).link_bytes(1 << 20, world_size=16)
        Links(within=7340032, across=132096)
        >>> int8().link_bytes(1 << 20, world_size=16)
        Links(within=0, across=1981440)
        """
        if self.exchange.sees_parameters:
            raise ValueError(
                f"what {self} sends depends on the parameters in a bucket, not on how many values it has: "
                "attach it to a model, and see wire.plan()"
            )
        values = Slot("values", 0, torch.Size([numel]), (1,))
        layout = BucketLayout.packed(0, dtype, [values])
        sent = [self.exchange.link_bytes(layout, world_size, step)[rank] for step in self.exchange.starts]
        return max(sent, key=sum)

    def wire_bytes(
        self, numel: int, dtype: torch.dtype = torch.float32, *, rank: int = 0, world_size: int
    ) -> int:
        """Return the exact number of bytes that ``rank`` sends in a step for a bucket of ``numel`` values.

        In a schedule, that is the number of the stage that sends most. The votes on parameters that may be
        unused are not counted. Raises ValueError if the number depends on the parameters in the bucket, as
        in a route and for low rank; `Wire.plan` gives it for a model.

        >>> from gradwire.recipes import bf16, fp32
        >>> fp32().wire_bytes(1024, world_size=2)
        4096
        >>> bf16().wire_bytes(1024, world_size=2)
        2048
        """
        return sum(self.link_bytes(numel, dtype, rank=rank, world_size=world_size))
