"""Points of loss against bytes as an SVG: a mark for each length of run, a label for each recipe."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from front import Point, front_of, points_of, settings_of
from runs import BASE, Run, Setting

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 610, 62, 20, 150, 46
INK, PAPER, GRID = "#24292f", "#ffffff", "#e6e8eb"
# Colors of Okabe and Ito, which colour-blind people can tell apart.
MARKS: list[tuple[str, Callable[[float, float], str]]] = [
    ("#0072b2", lambda x, y: f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"),
    ("#009e73", lambda x, y: f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z"),
    ("#d55e00", lambda x, y: f"M{x:.1f} {y - 5:.1f}l5 9h-10z"),
    ("#cc79a7", lambda x, y: f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5 -5.5 5.5 -5.5 -5.5z"),
]
# In percent. Gaps beyond the last are left out.
TICKS = (-2, -1, 0, 1, 2, 5, 10, 20, 40)
HALO = f'paint-order="stroke" stroke="{PAPER}" stroke-width="3" stroke-linejoin="round"'
LETTER_WIDTH, LABEL_HEIGHT = 6.1, 12
PARAMETERS = 100e6
"""The size of the model whose links the upper axis has."""


@dataclass(frozen=True)
class Box:
    """A part of the drawing that a label or a mark takes."""

    left: float
    right: float
    top: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        apart_x = self.right < other.left or other.right < self.left
        return not apart_x and self.top < other.bottom and other.top < self.bottom


@dataclass(frozen=True)
class Axes:
    """Bytes from left to right on a logarithmic axis; gaps upwards, on one that is linear near 0."""

    most: float
    low: float
    high: float

    def x(self, fewer: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(fewer) / math.log(self.most)

    def y(self, gap: float) -> float:
        low, high = math.asinh(self.low), math.asinh(self.high)
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.asinh(gap)) / (high - low)

    def draw(self, bits_per_step: float) -> list[str]:
        """Draw grid and ticks; the upper ones are links that carry so many bits in a second."""
        lines = []
        for gap in (tick for tick in TICKS if self.low <= tick <= self.high):
            lines.append(f'<path d="M{LEFT} {self.y(gap):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
            lines.append(_text(LEFT - 8, self.y(gap) + 4, f"{gap:+d} %" if gap else "0", anchor="end"))
        for fewer in (2**power for power in range(math.floor(math.log2(self.most)) + 1)):
            x = self.x(fewer)
            lines.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{GRID}"/>')
            lines.append(_text(x, HEIGHT - BOTTOM + 16, f"{fewer}x", anchor="middle"))
            lines.append(_text(x, TOP - 7, _rate(bits_per_step / fewer), anchor="middle"))
        return lines


def _rate(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:.2g} G" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.0f} M"


def _text(x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(words)}</text>'


def _place(words: str, marks: Sequence[tuple[float, float]], taken: list[Box]) -> str:
    """Write a label beside one of its marks, where it meets the fewest others, and take that place."""
    wide = LETTER_WIDTH * len(words)
    best: tuple[float, float, str, Box, str] | None = None
    for x, y in marks:
        for shift in range(-3, 4):
            for left, anchor, at in ((x + 9, "start", x + 9), (x - 9 - wide, "end", x - 9)):
                middle = y + shift * LABEL_HEIGHT
                box = Box(left, left + wide, middle - LABEL_HEIGHT / 2, middle + LABEL_HEIGHT / 2)
                if box.right > WIDTH or box.left < LEFT or box.top < TOP or box.bottom > HEIGHT - BOTTOM:
                    continue
                cost = 10 * sum(box.meets(other) for other in taken) + abs(shift) + (anchor == "end") / 2
                if best is None or cost < best[0]:
                    end = at + (3 if anchor == "end" else -3)
                    leader = (
                        f'<path d="M{x:.1f} {y:.1f}L{end:.1f} {middle:.1f}" stroke="{INK}" opacity="0.4"/>'
                    )
                    best = cost, at, anchor, box, leader if abs(shift) > 1 else ""
    assert best is not None, "a drawing is wider than two labels"
    _, at, anchor, box, leader = best
    taken.append(box)
    return leader + _text(at, (box.top + box.bottom) / 2 + 4, words, anchor=anchor, style=HALO)


def _draw_setting(points: Sequence[Point], number: int, axes: Axes) -> list[str]:
    """Draw the marks of one setting, the range of their seeds, and their front."""
    color, shape = MARKS[number]
    path = " ".join(f"{axes.x(point.fewer):.1f},{axes.y(point.gap):.1f}" for point in front_of(points))
    lines = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-opacity="0.5"/>']
    for point in points:
        x, y = axes.x(point.fewer), axes.y(point.gap)
        ends = f"{axes.y(min(point.gaps)):.1f}V{axes.y(max(point.gaps)):.1f}"
        fill = PAPER if point.is_outer else color
        lines.append(f'<path d="M{x:.1f} {ends}" stroke="{color}"/>')
        lines.append(
            f'<path class="point" d="{shape(x, y)}" fill="{fill}" stroke="{color}" stroke-width="1.5"/>'
        )
    return lines


def _legend(settings: Sequence[Setting], has_outer: bool) -> list[str]:
    by_workers = len({setting.workers for setting in settings}) > 1
    keys = [
        (color, color, shape, f"{each.steps} steps" + (f", {each.workers} workers" if by_workers else ""))
        for each, (color, shape) in zip(settings, MARKS, strict=False)
    ]
    if has_outer:
        keys.append((INK, PAPER, MARKS[0][1], "hollow: an outer loop"))
    lines, x, y = [], 12.0, 98
    for color, fill, shape, words in keys:
        lines.append(f'<path d="{shape(x + 5, y - 4)}" fill="{fill}" stroke="{color}" stroke-width="1.5"/>')
        lines.append(_text(x + 15, y, words))
        x += 24 + LETTER_WIDTH * len(words)
    return lines


def draw_front(runs: Sequence[Run]) -> str:
    """Draw an SVG: a point for each recipe and setting, with the least and greatest gap of its seeds.

    Raises ValueError if runs do not compare, or have more settings than there are marks.
    """
    settings = settings_of(runs)
    if len(settings) > len(MARKS):
        raise ValueError(f"there are marks for {len(MARKS)} settings, and these runs have {len(settings)}")
    every = [points_of(own) for own in settings.values()]
    shown = [[point for point in own if point.gap <= TICKS[-1]] for own in every]
    points = [point for own in shown for point in own]
    gaps = [gap for point in points for gap in point.gaps]
    axes = Axes(1.25 * max(2.0, *(p.fewer for p in points)), min(-0.5, *gaps), 1.2 * max(1.0, *gaps))
    marks: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        marks.setdefault(point.label, []).append((axes.x(point.fewer), axes.y(point.gap)))
    taken = [Box(x - 5, x + 5, y - 5, y + 5) for own in marks.values() for x, y in own]
    labels = [_place(words, own, taken) for words, own in marks.items()]
    joined = [
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in own)}" fill="none" stroke="{INK}" '
        'stroke-dasharray="1 3"/>'
        for own in marks.values()
        if len(own) > 1
    ]
    first = next(run for run in next(iter(settings.values())) if run.recipe == BASE)
    where = f"{first.num_parameters / 1e6:.1f} M parameters, {first.setting}; {first.machine}"
    left_out = sum(map(len, every)) - len(points)
    notes = [
        where if len(settings) == 1 else where.replace(f", {first.setting.steps} steps", ""),
        "A point is a mean over seeds, its line the least and the greatest."
        + (f" {left_out} gaps above {TICKS[-1]} % are left out." if left_out else ""),
        "Lines join points that no other of the same length beats, dots those of one recipe.",
    ]
    bits = 8 * first.bytes_per_step / first.num_parameters * PARAMETERS
    upper = f"bit/s that carry {PARAMETERS / 1e6:.0f} M parameters, if a step computes for 1 s"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}">',
            f'<rect width="100%" height="100%" fill="{PAPER}"/>',
            _text(12, 22, "Loss gap to fp32 against bytes", style='font-size="15" font-weight="bold"'),
            *(_text(12, 41 + 16 * number, note) for number, note in enumerate(notes)),
            *_legend(list(settings), any(point.is_outer for point in points)),
            *axes.draw(bits),
            _text(WIDTH - RIGHT, TOP - 24, upper, anchor="end"),
            *joined,
            *(line for number, own in enumerate(shown) for line in _draw_setting(own, number, axes)),
            *labels,
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "times fewer bytes than fp32", anchor="middle"),
            "</svg>\n",
        ]
    )
