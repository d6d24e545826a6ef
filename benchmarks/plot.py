"""Draw a saved record of `gradwire headroom` as an SVG.

python benchmarks/plot.py headroom.json docs/headroom.svg
"""

import sys
from html import escape
from pathlib import Path

from gradwire.headroom import Record, read_records

WIDTH, BAR, GAP, LEFT, RIGHT, TOP = 760, 22, 12, 110, 150, 84
INK, COMPUTE, COMMUNICATION = "#24292f", "#8da9c4", "#e07a5f"


def bars(record: Record) -> list[str]:
    compute = record.noop.step_ms
    scale = (WIDTH - LEFT - RIGHT) / max(row.step_ms for row in record.rows)
    lines = []
    for i, row in enumerate(record.rows):
        y = TOP + i * (BAR + GAP)
        solid = min(row.step_ms, compute) * scale
        rest = max(row.step_ms - compute, 0.0) * scale
        sent = "" if row.bytes_per_step is None else f", {row.bytes_per_step / 1e6:.1f} MB"
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(record.label(row))}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{solid:.1f}" height="{BAR}" fill="{COMPUTE}"/>',
            f'<rect x="{LEFT + solid:.1f}" y="{y}" width="{rest:.1f}" height="{BAR}" '
            f'fill="{COMMUNICATION}"/>',
            f'<text x="{LEFT + solid + rest + 8:.1f}" y="{y + 16}">{row.step_ms:.0f} ms{sent}</text>',
        ]
    return lines


def draw(record: Record) -> str:
    height = TOP + len(record.rows) * (BAR + GAP) + 8
    title = f"A training step on {record.world_size} ranks: {record.workload}"
    where = f"{record.machine}, {record.backend} {record.link or 'on loopback'}, torch {record.torch_version}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="sans-serif" font-size="13" fill="{INK}">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
            f'<text x="12" y="42">{escape(where)}</text>',
            f'<rect x="{LEFT}" y="56" width="12" height="12" fill="{COMPUTE}"/>'
            f'<text x="{LEFT + 18}" y="67">compute</text>',
            f'<rect x="{LEFT + 90}" y="56" width="12" height="12" fill="{COMMUNICATION}"/>'
            f'<text x="{LEFT + 108}" y="67">communication</text>',
            *bars(record),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    (record,) = read_records(source.read_text())
    target.write_text(draw(record))
