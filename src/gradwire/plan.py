"""What a wire will send: which parameters how, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.exchanges import Exchange, LowRank, Route, Selector
from gradwire.layout import BucketLayout
from gradwire.recipes import Recipe


@dataclass(frozen=True)
class PlannedRoute:
    """The parameters that go by one recipe."""

    recipe: str
    """The recipe; of a route, with its pattern."""
    parameters: tuple[str, ...]
    numel: int
    bytes_sent: int
    """By this rank, in a step; of a schedule, in the stage that sends most."""


@dataclass(frozen=True)
class WirePlan:
    """One entry for each recipe that parameters go by; prints as a table."""

    routes: tuple[PlannedRoute, ...]

    @property
    def bytes_sent(self) -> int:
        """By this rank, in a step."""
        return sum(route.bytes_sent for route in self.routes)

    def __str__(self) -> str:
        rows = [
            (r.recipe, f"{len(r.parameters):,}", f"{r.numel:,}", f"{r.bytes_sent:,}") for r in self.routes
        ]
        rows = [("recipe", "parameters", "values", "bytes sent"), *rows]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))])
            for row in rows
        )


def make_plan(recipe: Recipe, layouts: Sequence[BucketLayout], rank: int, world_size: int) -> WirePlan:
    """What ``rank`` sends for these buckets."""
    routes = (
        recipe.exchange.routes if isinstance(recipe.exchange, Route) else ((Selector("*"), recipe.exchange),)
    )
    texts = str(recipe)[len("route(") : -1].split("; ") if len(routes) > 1 else [str(recipe)]
    router = Route(routes)
    planned = []
    for number, text in enumerate(texts):
        names: list[str] = []
        numel = num_bytes = 0
        for layout in layouts:
            for exchange, part, _ in router.split(layout):
                if part.index % len(routes) == number:
                    names += [slot.name for slot in part.slots]
                    numel += part.numel
                    num_bytes += _bytes(exchange, part, rank, world_size)
        planned.append(PlannedRoute(text, tuple(names), numel, num_bytes))
    return WirePlan(tuple(planned))


def _bytes(exchange: Exchange, layout: BucketLayout, rank: int, world_size: int) -> int:
    if isinstance(exchange, LowRank):  # depends on shapes
        return exchange.bucket_bytes(layout, rank, world_size)
    return exchange.wire_bytes(layout.numel, layout.dtype, rank, world_size)
