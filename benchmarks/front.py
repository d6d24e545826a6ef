"""Runs of `convergence.py` as one plot: how many times fewer bytes, against how much more loss."""

import math
import statistics
from collections.abc import Sequence
from html import escape

from runs import Run, by_recipe, setting_of

BASE = "fp32"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 430, 60, 170, 78, 50
INK, POINT, FRONT, GRID = "#24292f", "#3d5a80", "#e07a5f", "#e6e8eb"
# Gaps beyond this many percent would flatten the rest.
LARGEST_GAP = 6.0
LABEL_HEIGHT, LETTER_WIDTH = 13, 7


def gaps_of(runs: Sequence[Run]) -> dict[str, tuple[float, list[float]]]:
    """Return, for each recipe, how many times fewer bytes than fp32 it sends, and its gaps in percent."""
    base = {run.seed: run for run in runs if run.recipe == BASE}
    if not base:
        raise ValueError(f"there are no runs of {BASE} to compare with")
    found = {}
    for recipe, same in by_recipe(runs).items():
        gaps = [100 * (run.loss / base[run.seed].loss - 1) for run in same if run.seed in base]
        if gaps:
            fewer = base[min(base)].bytes_per_step / same[0].bytes_per_step
            found[recipe] = fewer, gaps
    return found


def front_of(points: dict[str, tuple[float, list[float]]]) -> list[str]:
    """Return the recipes than which none sends fewer bytes at a smaller mean gap, by their bytes."""
    by_bytes = sorted(points, key=lambda recipe: -points[recipe][0])
    front, best = [], math.inf
    for recipe in by_bytes:
        gap = statistics.mean(points[recipe][1])
        if gap < best:
            front.append(recipe)
            best = gap
    return front[::-1]


def _free_height(taken: list[tuple[float, float, float]], left: float, right: float, height: float) -> float:
    """Return the height next to this one where a label meets no other, and take it."""
    for step in range(20):
        at = height + (step // 2 + step % 2) * LABEL_HEIGHT * (-1 if step % 2 else 1)
        if all(abs(at - y) >= LABEL_HEIGHT or right < x or left > end for x, end, y in taken):
            break
    taken.append((left, right, at))
    return at


def draw_front(runs: Sequence[Run]) -> str:
    """Draw an SVG: a point for each recipe, with the least and the greatest gap of its seeds."""
    setting, points = setting_of(runs), gaps_of(runs)
    shown = {name: point for name, point in points.items() if statistics.mean(point[1]) <= LARGEST_GAP}
    missing = [name for name in points if name not in shown]
    most = max(fewer for fewer, _ in shown.values()) * 1.3
    least = min(-0.5, *(min(gaps) for _, gaps in shown.values()))

    def x_of(fewer: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(fewer) / math.log(most)

    def y_of(gap: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (LARGEST_GAP - min(gap, LARGEST_GAP)) / (LARGEST_GAP - least)

    lines = []
    for gap in range(math.ceil(least), int(LARGEST_GAP) + 1):
        lines.append(f'<path d="M{LEFT} {y_of(gap):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        label = f"{gap:+d} %" if gap else "0"
        lines.append(f'<text x="{LEFT - 8}" y="{y_of(gap) + 4:.1f}" text-anchor="end">{label}</text>')
    for times in (1, 2, 4, 8, 16, 32, 64, 128):
        if times <= most:
            at = x_of(times)
            lines.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{GRID}"/>')
            lines.append(
                f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{times}x</text>'
            )
    path = " ".join(
        f"{x_of(shown[name][0]):.1f},{y_of(statistics.mean(shown[name][1])):.1f}" for name in front_of(shown)
    )
    lines.append(f'<polyline points="{path}" fill="none" stroke="{FRONT}" stroke-width="1.5"/>')
    taken: list[tuple[float, float, float]] = []
    for name, (fewer, gaps) in sorted(shown.items(), key=lambda item: item[1][0]):
        x, y = x_of(fewer), y_of(statistics.mean(gaps))
        lines.append(f'<path d="M{x:.1f} {y_of(min(gaps)):.1f}V{y_of(max(gaps)):.1f}" stroke="{POINT}"/>')
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{POINT}"/>')
        at = _free_height(taken, x, x + LETTER_WIDTH * len(name), y + 4)
        lines.append(f'<text x="{x + 8:.1f}" y="{at:.1f}">{escape(name)}</text>')
    where = f"{runs[0].num_parameters / 1e6:.1f} M parameters, {setting}; {runs[0].machine}"
    note = "A point is a mean over seeds, its line the least and the greatest."
    if missing:
        note += f" {len(missing)} recipes with gaps above {LARGEST_GAP:g} % are left out."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            '<text x="12" y="22" font-size="15" font-weight="bold">Loss gap to fp32 against bytes</text>',
            f'<text x="12" y="41">{escape(where)}</text>',
            f'<text x="12" y="58">{escape(note)}</text>',
            *lines,
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
            "times fewer bytes than fp32</text>",
            "</svg>\n",
        ]
    )
