"""Plans: the recipe of each parameter of a wire, and the bytes that it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.buckets import BucketLayout
from gradwire.exchanges import Exchange, Route, Selector
from gradwire.recipes.value import Recipe


@dataclass(frozen=True)
class PlannedRoute:
    """The parameters that one recipe averages."""

    recipe: str
    """The recipe; in a route, ``pattern=recipe``."""
    parameters: tuple[str, ...]
    numel: int
    bytes_sent: int
    """Bytes that this rank sends in a step."""


@dataclass(frozen=True)
class WirePlan:
    """One entry for each recipe of a wire; prints as a table."""

    routes: tuple[PlannedRoute, ...]
    note: str = ""
    """Lines that are printed above the table; empty if there are none."""
    bytes_gathered: int = 0
    """Bytes that this rank sends in a step to gather a sharded model's parameters."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(route.bytes_sent for route in self.routes)

    def __str__(self) -> str:
        rows = [
            (r.recipe, f"{len(r.parameters):,}", f"{r.numel:,}", f"{r.bytes_sent:,}") for r in self.routes
        ]
        rows = [("recipe", "parameters", "values", "bytes sent"), *rows]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [self.note] if self.note else []
        lines += [
            "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))])
            for row in rows
        ]
        return "\n".join(lines)


def make_plan(
    recipe: Recipe, layouts: Sequence[BucketLayout], rank: int, world_size: int, step: int | None = None
) -> WirePlan:
    """Return the plan of what ``rank`` sends for these buckets in ``step``.

    Without a step, the plan is that of the stage that sends most. Raises ValueError for a step before 0.
    """
    if step is not None and step < 0:
        raise ValueError(f"the steps of a plan are counted from 0: there is no step {step}")
    router, texts = Route(((Selector("*"), recipe.exchange),)), [str(recipe)]
    if isinstance(recipe.exchange, Route):
        router, texts = recipe.exchange, [f"{selector}={each}" for selector, each in recipe.parts]
    routed: list[list[tuple[Exchange, BucketLayout]]] = [[] for _ in texts]
    for layout in layouts:
        for exchange, part, _ in router.split(layout):
            routed[part.index % len(texts)].append((exchange, part))

    def bytes_in(step: int) -> list[int]:
        return [sum(sum(e.link_bytes(p, world_size, step)[rank]) for e, p in parts) for parts in routed]

    steps = router.starts if step is None else [step]
    figures = zip(texts, routed, max(map(bytes_in, steps), key=sum), strict=True)
    return WirePlan(
        tuple(
            PlannedRoute(
                text,
                tuple(slot.name for _, part in parts for slot in part.slots),
                sum(part.numel for _, part in parts),
                num_bytes,
            )
            for text, parts, num_bytes in figures
        )
    )
