"""Runs of `convergence.py`: rows of a CSV file, a table, and curves of loss as an SVG."""

import csv
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from gradwire.lab.rates import parse_rate

BASE = "fp32"


@dataclass(frozen=True)
class Setting:
    """What is trained, and how long."""

    workers: int
    steps: int
    width: int
    layers: int
    length: int
    batch: int
    """Pieces of text of this length that each worker takes in a step."""
    lr: float
    optimizer: str = "adamw"

    def __str__(self) -> str:
        size = f"{self.layers} layers of width {self.width}"
        by = "" if self.optimizer == "adamw" else f"{self.optimizer.upper()} with lr {self.lr:g}, "
        return f"{self.workers} workers x {self.batch} x {self.length} bytes, {self.steps} steps, {by}{size}"


@dataclass(frozen=True)
class Run:
    """One recipe with one seed."""

    recipe: str
    seed: int
    setting: Setting
    num_parameters: int
    bytes_per_step: float
    """What the busiest worker sends."""
    seconds: float
    curve: dict[int, float]
    """Held-out loss, in nats a byte, by the number of steps."""
    machine: str
    versions: str

    @property
    def loss(self) -> float:
        return self.curve[max(self.curve)]

    @property
    def lowest(self) -> float:
        """The least loss on the way: below that at the end if the model came to know its text by heart."""
        return min(self.curve.values())


def append(path: Path, run: Run) -> None:
    """Add a row, and the header if it is the first."""
    row = {
        "recipe": run.recipe,
        "seed": run.seed,
        **dataclasses.asdict(run.setting),
        "num_parameters": run.num_parameters,
        "bytes_per_step": run.bytes_per_step,
        "held_out_loss": f"{run.loss:.6f}",
        "seconds": f"{run.seconds:.1f}",
        "curve": " ".join(f"{step}={loss:.6f}" for step, loss in run.curve.items()),
        "machine": run.machine,
        "versions": run.versions,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    columns = list(row) if is_new else _columns(path)
    if "optimizer" not in columns and run.setting.optimizer == "adamw":
        del row["optimizer"]  # the file is older than the column
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def _columns(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return next(csv.reader(file))


def read(path: Path) -> list[Run]:
    """All rows."""
    with path.open(newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> Run:
    kinds = {field.name: field.type for field in dataclasses.fields(Setting)}
    points = [point.split("=") for point in row["curve"].split()]
    return Run(
        recipe=row["recipe"],
        seed=int(row["seed"]),
        # Without a column for it, the optimizer was the default.
        setting=Setting(**{name: kind(row[name]) for name, kind in kinds.items() if name in row}),  # type: ignore[operator]
        num_parameters=int(row["num_parameters"]),
        bytes_per_step=float(row["bytes_per_step"]),
        seconds=float(row["seconds"]),
        curve={int(step): float(loss) for step, loss in points},
        machine=row["machine"],
        versions=row["versions"],
    )


def setting_of(runs: Sequence[Run]) -> Setting:
    """The one setting of all runs, since losses of two do not compare."""
    settings = list(dict.fromkeys(run.setting for run in runs))
    if len(settings) != 1:
        raise ValueError(f"runs of one setting are wanted, not of {len(settings)}: {settings}")
    return settings[0]


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of each recipe, in the order in which recipes first appear."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.recipe, []).append(run)
    return found


def table(runs: Sequence[Run]) -> str:
    """Markdown: for each recipe its loss over seeds, and the gap to fp32's, seed by seed.

    Where fp32's loss has risen before the end, with columns for the lowest too.
    """
    setting = setting_of(runs)
    base = {run.seed: run for run in runs if run.recipe == BASE}
    losses_of: dict[str, Callable[[Run], float]] = {"held-out loss": lambda run: run.loss}
    if any(run.lowest < run.loss for run in base.values()):
        losses_of["lowest on the way"] = lambda run: run.lowest
    header = ["recipe", "bytes a step", "less than fp32"]
    header += [cell for name in losses_of for cell in (name, "gap to fp32")]
    header += ["seeds"]
    first = runs[0]
    machines = " and ".join(dict.fromkeys(f"{run.machine}, {run.versions}" for run in runs))
    lines = [
        f"{setting}, {first.num_parameters / 1e6:.1f} M parameters; {machines}.",
        "",
        f"| {' | '.join(header)} |",
        f"|---|{'---:|' * (len(header) - 1)}",
    ]
    for recipe, same in by_recipe(runs).items():
        less = f"{base[min(base)].bytes_per_step / same[0].bytes_per_step:.1f}x" if base else "-"
        cells = [f"`{recipe}`", f"{same[0].bytes_per_step / 1e6:.3g} MB", less]
        for loss_of in losses_of.values():
            losses = [loss_of(run) for run in same]
            gaps = [100 * (loss_of(run) / loss_of(base[run.seed]) - 1) for run in same if run.seed in base]
            cells += [
                f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})",
                _gap(gaps) if recipe != BASE else "-",
            ]
        lines.append(f"| {' | '.join([*cells, str(len(same))])} |")
    return "\n".join(lines)


def _gap(gaps: Sequence[float]) -> str:
    if not gaps:
        return "-"
    return f"{statistics.mean(gaps):+.2f} % ({min(gaps):+.2f} to {max(gaps):+.2f})"


PANEL, HEIGHT, LEFT, TOP, GAP = 300, 250, 52, 62, 46
KEYS_PER_LINE = 3
INK = "#24292f"
COLOURS = [
    "#24292f", "#8da9c4", "#3d5a80", "#2a9d8f", "#e07a5f", "#f2a65a", "#9b5de5", "#bc4749", "#6a994e",
    "#b08968", "#577590", "#d4a5a5",
]  # fmt: skip


def draw(runs: Sequence[Run], link: str) -> str:
    """Loss against steps, against bytes, and against time on a link, each recipe's mean over its seeds."""
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
    height = TOP + HEIGHT + 64 + 18 * math.ceil(len(recipes) / KEYS_PER_LINE)
    title = f"Held-out loss, nats a byte: {runs[0].num_parameters / 1e6:.1f} M parameters, {setting}"
    panels = [
        _panel(recipes, name, x_of, is_log[name], LEFT + i * (PANEL + GAP))
        for i, (name, x_of) in enumerate(axes.items())
    ]
    keys = []
    for i, recipe in enumerate(recipes):
        x = LEFT + width // KEYS_PER_LINE * (i % KEYS_PER_LINE)
        y = TOP + HEIGHT + 58 + 18 * (i // KEYS_PER_LINE)
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
    xs = [math.log10(x) if log else x for x, _ in points]
    ys = [y for _, y in points]
    # The first steps fall from 5.5 and would flatten the rest.
    low, high = min(ys), statistics.quantiles(ys, n=10)[7]
    x_low, x_high = (min(xs), max(xs)) if log else (0.0, max(xs))

    def place(x: float, y: float) -> tuple[float, float]:
        across = ((math.log10(x) if log else x) - x_low) / (x_high - x_low)
        up = (min(y, high) - low) / (high - low)
        return left + across * PANEL, TOP + (1 - up) * HEIGHT

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
    for i, curve in enumerate(curves.values()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        colour = COLOURS[i % len(COLOURS)]
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return lines


def _mean_curve(runs: Sequence[Run], x_of: Callable[[Run, int], float]) -> list[tuple[float, float]]:
    """Without the point before the first step, which has no place on an axis of powers of ten."""
    steps = [step for step in runs[0].curve if step > 0 and all(step in run.curve for run in runs)]
    return [(x_of(runs[0], step), statistics.mean(run.curve[step] for run in runs)) for step in steps]
