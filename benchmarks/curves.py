"""Runs of `convergence.py` as a table, and as curves of loss in an SVG."""

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

from gradwire.links import parse_rate
from runs import BASE, Run, by_recipe, gaps_to, has_overfitted, setting_of


def table(runs: Sequence[Run]) -> str:
    """Return a Markdown table: for each recipe its loss, and its gap to fp32 with the same seed.

    If fp32's loss has risen before the end, the table has columns for the lowest loss too.
    """
    setting = setting_of(runs)
    base = {run.seed: run for run in runs if run.recipe == BASE}
    names = {"held-out loss": False}
    if has_overfitted(base.values()):
        names["lowest on the way"] = True
    header = ["recipe", "bytes a step", "less than fp32"]
    header += [cell for name in names for cell in (name, "gap to fp32")]
    header += ["seeds"]
    first = runs[0]
    machines = " and ".join(dict.fromkeys(f"{run.machine}, {run.versions}" for run in runs))
    lines = [
        f"{setting}, {first.num_parameters / 1e6:.1f} M parameters;",
        f"{machines}.",
        "",
        f"| {' | '.join(header)} |",
        f"|---|{'---:|' * (len(header) - 1)}",
    ]
    for recipe, same in by_recipe(runs).items():
        less = f"{base[min(base)].bytes_per_step / same[0].bytes_per_step:.1f}x" if base else "-"
        cells = [f"`{recipe}`", f"{same[0].bytes_per_step / 1e6:.3g} MB", less]
        for lowest in names.values():
            losses = [run.lowest if lowest else run.loss for run in same]
            cells += [
                f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})",
                _gap(gaps_to(base, same, lowest=lowest)) if recipe != BASE else "-",
            ]
        lines.append(f"| {' | '.join([*cells, str(len(same))])} |")
    return "\n".join(lines)


def _gap(gaps: Sequence[float]) -> str:
    if not gaps:
        return "-"
    mean, least, most = (round(each, 2) + 0.0 for each in (statistics.mean(gaps), min(gaps), max(gaps)))
    return f"{mean:+.2f} % ({least:+.2f} to {most:+.2f})"  # + 0.0 turns -0.0 into 0.0


PANEL, HEIGHT, LEFT, TOP, GAP = 300, 250, 52, 62, 46
# The longest name of which three fit into a line of the legend.
LONGEST_OF_THREE = 44
INK = "#24292f"
COLOURS = [
    "#24292f", "#8da9c4", "#3d5a80", "#2a9d8f", "#e07a5f", "#f2a65a", "#9b5de5", "#bc4749", "#6a994e",
    "#b08968", "#577590", "#d4a5a5",
]  # fmt: skip


def draw(runs: Sequence[Run], link: str) -> str:
    """Draw an SVG: each recipe's mean loss over steps, over bytes, and over time on a link."""
    rate = parse_rate(link)
    setting, recipes = setting_of(runs), by_recipe(runs)
    computing = [run.seconds / setting.steps / setting.workers for run in recipes.get(BASE, runs)]
    compute_s = statistics.median(computing)
    axes: dict[str, Callable[[Run, int], float]] = {
        "steps": lambda run, step: float(step),
        "MB sent by a worker": lambda run, step: step * run.bytes_per_step / 1e6,
        f"seconds on {link}": lambda run, step: step * (compute_s + 8 * run.bytes_per_step / rate),
    }
    is_log = {name: i > 0 for i, name in enumerate(axes)}
    width = LEFT + len(axes) * (PANEL + GAP)
    per_line = 3 if max(map(len, recipes)) <= LONGEST_OF_THREE else 2
    height = TOP + HEIGHT + 64 + 18 * math.ceil(len(recipes) / per_line)
    title = f"Held-out loss, {setting.unit}: {runs[0].num_parameters / 1e6:.1f} M parameters, {setting}"
    panels = [
        _panel(recipes, name, x_of, is_log[name], LEFT + i * (PANEL + GAP))
        for i, (name, x_of) in enumerate(axes.items())
    ]
    keys = []
    for i, recipe in enumerate(recipes):
        x = LEFT + width // per_line * (i % per_line)
        y = TOP + HEIGHT + 58 + 18 * (i // per_line)
        keys.append(
            f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{COLOURS[i % len(COLOURS)]}"/>'
            f'<text x="{x + 20}" y="{y}">{escape(recipe)}</text>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
            f'<text x="12" y="42">{escape(runs[0].machine)}; mean of '
            f"{len({run.seed for run in runs})} seeds; on the link, a step computes "
            f"for {1e3 * compute_s:.1f} ms and then sends</text>",
            *(line for panel in panels for line in panel),
            *keys,
            "</svg>\n",
        ]
    )


def _panel(
    recipes: dict[str, list[Run]], name: str, x_of: Callable[[Run, int], float], log: bool, left: float
) -> list[str]:
    curves = {recipe: _mean_curve(runs, x_of) for recipe, runs in recipes.items()}
    points = [point for curve in curves.values() for point in curve]
    if not points:
        raise ValueError("there is no loss to draw: no step was evaluated, or no loss is finite")
    xs = [math.log10(x) if log else x for x, _ in points]
    ys = [y for _, y in points]
    # The first losses, from 5.5 down, would flatten the rest.
    low, high = _apart(min(ys), statistics.quantiles(ys, n=10)[7] if len(ys) > 1 else ys[0])
    x_low, x_high = _apart(min(xs), max(xs)) if log else (0.0, max(xs))

    def place(x: float, y: float) -> tuple[float, float]:
        across = ((math.log10(x) if log else x) - x_low) / (x_high - x_low)
        return across * PANEL, HEIGHT * (high - y) / (high - low)

    bottom = TOP + HEIGHT
    lines = [
        f'<path d="M{left} {TOP}V{bottom}H{left + PANEL}" fill="none" stroke="{INK}"/>',
        f'<text x="{left + PANEL / 2}" y="{bottom + 34}" text-anchor="middle">{escape(name)}</text>',
    ]
    for i in range(5):
        y = low + (high - low) * i / 4
        y_at = bottom - HEIGHT * i / 4
        lines.append(f'<text x="{left - 6}" y="{y_at + 4:.1f}" text-anchor="end">{y:.2f}</text>')
    ticks = range(math.ceil(x_low), math.floor(x_high) + 1) if log else range(5)
    for tick in ticks:
        x = 10.0**tick if log else x_high * tick / 4
        x_at = left + PANEL * ((tick - x_low) / (x_high - x_low) if log else tick / 4)
        lines.append(f'<text x="{x_at:.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    # A nested SVG clips the curves; 2 pixels more make room for the width of lines.
    lines.append(f'<svg x="{left}" y="{TOP}" width="{PANEL + 2}" height="{HEIGHT + 2}">')
    for i, curve in enumerate(curves.values()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        colour = COLOURS[i % len(COLOURS)]
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return [*lines, "</svg>"]


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis, at least 1 apart if they were equal."""
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _mean_curve(runs: Sequence[Run], x_of: Callable[[Run, int], float]) -> list[tuple[float, float]]:
    """Return the mean loss of several runs, by position on the x axis.

    Leaves out step 0, which a logarithmic axis cannot show, and losses that are not finite.
    """
    steps = [step for step in runs[0].curve if step > 0 and all(step in run.curve for run in runs)]
    means = {step: statistics.mean(run.curve[step] for run in runs) for step in steps}
    return [(x_of(runs[0], step), mean) for step, mean in means.items() if math.isfinite(mean)]
