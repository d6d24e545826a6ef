"""Write the figures of the recipes' pages, and the plot of speed against link speed, from measured runs.

python benchmarks/gallery.py    # reads docs/fidelity-real.csv and docs/performance.md
"""

import csv
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
LINKS = ("100 Mbit/s", "1 Gbit/s", "Loopback", "GPU")
BEGIN, END = "<!-- figures: python benchmarks/gallery.py -->", "<!-- end of figures -->"
# Colors of Okabe and Ito, which colour-blind people can tell apart.
BARS = {
    "torch fp16": "#999999",
    "int8": "#0072b2",
    "int4": "#56b4e9",
    "int2": "#e69f00",
    "powersgd": "#d55e00",
    "noop": "#24292f",
}
INK, GRID = "#24292f", "#d0d7de"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 340, 50, 60, 290
LOWEST, HIGHEST = 0.5, 50.0


def gains(link: str) -> dict[str, float]:
    """Return how many times as fast as DDP each row of a section's first table of steps is."""
    page = (DOCS / "performance.md").read_text()
    section = page.partition(f"### {link}\n")[2].partition("\n#")[0]
    table = section.partition("\n| a step")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in f"|{table}".splitlines()]
    column = rows[0].index("DDP over it")
    return {row[0]: float(row[column]) for row in rows[2:] if re.fullmatch(r"[\d.]+", row[column])}


def loss_gap(recipe: str) -> tuple[str, str]:
    """Return a recipe's bytes as a fraction of fp32's, and its loss gap; dashes if it was not run."""
    with (DOCS / "fidelity-real.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    base = {run["seed"]: run for run in runs if run["recipe"] == "fp32"}
    own = [run for run in runs if run["recipe"] == recipe and run["seed"] in base]
    if not own:
        return "-", "-"
    gaps = [float(run["held_out_loss"]) / float(base[run["seed"]]["held_out_loss"]) - 1 for run in own]
    fraction = float(base["0"]["bytes_per_step"]) / float(own[0]["bytes_per_step"])
    gap = round(100 * statistics.mean(gaps), 2) + 0.0  # no negative zero
    return f"1/{round(fraction)}", f"{gap:+.2f} %"


def figures(recipes: list[str]) -> str:
    """Return the table of a recipe's page."""
    lines = [
        "| recipe | bytes, of fp32's | loss gap to fp32 | 100 Mbit/s | 1 Gbit/s | loopback | GPU |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for recipe in recipes:
        speeds = [gains(link).get(recipe) for link in LINKS]
        cells = [*loss_gap(recipe), *("-" if speed is None else f"{speed:.2f}x" for speed in speeds)]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page of a recipe with its figures brought up to date."""
    for path in sorted((DOCS / "recipes").glob("*.md")):
        before, begin, rest = path.read_text().partition(BEGIN)
        if begin:
            table, end, after = rest.partition(END)
            recipes = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
            yield path, f"{before}{BEGIN}\n\n{figures(recipes)}\n\n{end}{after}"


def height(gain: float) -> float:
    """Return the y of a gain on the logarithmic axis."""
    share = math.log(gain / LOWEST) / math.log(HIGHEST / LOWEST)
    return BOTTOM - share * (BOTTOM - TOP)


def speed_plot() -> str:
    """Return an SVG: how many times as fast as DDP, for each speed of links."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="{INK}"><title>Speed against link speed</title>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<text x="12" y="24" font-size="15" font-weight="bold">Steps of DDP over steps of each recipe, by '
        "link speed: more is faster</text>",
    ]
    for gain in (0.5, 1, 2, 5, 10, 20, 50):
        y, width = height(gain), 2 if gain == 1 else 1
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 12}" stroke="{GRID}" stroke-width="{width}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{gain:g}x</text>')
    x = LEFT + 4.0
    for name, color in BARS.items():
        lines.append(f'<rect x="{x:.0f}" y="36" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 17:.0f}" y="47">{"sends nothing" if name == "noop" else name}</text>')
        x += 50 + 7.5 * len(name)
    group = (WIDTH - LEFT - 20) / 3
    for index, link in enumerate(LINKS[:3]):
        found, bar = gains(link), (group - 36) / len(BARS)
        for place, (name, color) in enumerate(BARS.items()):
            if name not in found:
                continue
            left, y = LEFT + 18 + index * group + place * bar, height(found[name])
            low = height(1.0)
            top, tall = min(y, low), max(abs(y - low), 1.0)
            lines.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{bar - 4:.1f}" height="{tall:.1f}" '
                f'fill="{color}"/>'
            )
            lines.append(
                f'<text x="{left + bar / 2 - 2:.1f}" y="{top - 4:.1f}" text-anchor="middle" font-size="11">'
                f"{found[name]:.1f}</text>"
            )
        middle = LEFT + 18 + (index + 0.5) * group - 18
        label = "no limit (loopback)" if link == "Loopback" else link
        lines.append(f'<text x="{middle:.1f}" y="{BOTTOM + 24}" text-anchor="middle">{label}</text>')
    return "\n".join([*lines, "</svg>\n"])


def files() -> Iterator[tuple[Path, str]]:
    """Yield every file that this script writes, with its content."""
    yield from pages()
    yield DOCS / "speed.svg", speed_plot()


if __name__ == "__main__":
    for path, content in files():
        path.write_text(content)
