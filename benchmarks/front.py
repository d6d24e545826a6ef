"""Loss against bytes, as points of runs of `convergence.py`: gaps are to fp32 in the same setting."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from local_rows import parse
from runs import BASE, Run, Setting, by_recipe, gaps_to, has_overfitted


@dataclass(frozen=True)
class Point:
    """The runs of one recipe in one setting."""

    label: str
    fewer: float
    """How many times fewer bytes than fp32 a step sends."""
    gaps: list[float]
    """To fp32 with the same seeds, in percent."""
    is_outer: bool = False
    """True if parameters are averaged, every few steps."""

    @property
    def gap(self) -> float:
        return statistics.mean(self.gaps)


def label_of(recipe: str) -> str:
    """Return a short name for a row, without learning rates and momentum, which are tuned for a setting.

    >>> label_of("DiLoCo:period=40,lr=0.7,momentum=0.8,fragments=4,delay=2,recipe=int4")
    'DiLoCo 40, 4 fragments, delay 2, int4'
    """
    row = parse(recipe)
    if row is None:
        return recipe
    words = [f"{recipe.partition(':')[0]} {row.period}"]
    if row.outer is not None and row.outer.num_fragments > 1:
        words.append(f"{row.outer.num_fragments} fragments")
    if row.outer is not None and row.outer.delay:
        words.append(f"delay {row.outer.delay}")
    return ", ".join([*words, row.recipe.name])


def settings_of(runs: Sequence[Run]) -> dict[Setting, list[Run]]:
    """Group runs by setting, shortest first; raise ValueError if more than steps and workers differ.

    Of a recipe and seed that come twice, in two files, the first run is taken.
    """
    if not runs:
        raise ValueError("there are no runs in these files")
    kinds = {dataclasses.replace(run.setting, steps=1, workers=1, batch=1) for run in runs}
    if len(kinds) > 1:
        raise ValueError(f"runs may differ in steps and workers alone, but these have {len(kinds)} settings")
    once = {(run.setting, run.recipe, run.seed): run for run in reversed(runs)}
    settings = sorted({run.setting for run in runs}, key=lambda setting: (setting.steps, setting.workers))
    return {
        setting: [run for run in reversed(once.values()) if run.setting == setting] for setting in settings
    }


def points_of(runs: Sequence[Run]) -> list[Point]:
    """Return a point for each recipe; of rows that are tuned differently, the best one.

    Gaps are between final losses, or between the lowest ones on the way if fp32 has overfitted. Raises
    ValueError if there are no runs of fp32.
    """
    base = {run.seed: run for run in runs if run.recipe == BASE}
    if not base:
        raise ValueError(f"there are no runs of {BASE} to compare with, of {runs[0].setting}")
    found: dict[str, Point] = {}
    for recipe, same in by_recipe(runs).items():
        gaps = gaps_to(base, same, lowest=has_overfitted(base.values()))
        if gaps:
            fewer = base[min(base)].bytes_per_step / same[0].bytes_per_step
            point = Point(label_of(recipe), fewer, gaps, parse(recipe) is not None)
            found[point.label] = min(point, found.get(point.label, point), key=lambda each: each.gap)
    return list(found.values())


def front_of(points: Sequence[Point]) -> list[Point]:
    """Return the points than which none sends fewer bytes at a smaller mean gap, by their bytes."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.fewer, point.gap)):
        if not front or point.gap < front[-1].gap:
            front.append(point)
    return front[::-1]
