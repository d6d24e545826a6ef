"""Draw what `attach` does, how ranks average, and what each recipe sends, as SVG files of the docs.

python benchmarks/drawings.py    # writes docs/*.svg and docs/recipes/*.svg
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
# Colors of Okabe and Ito, which colour-blind people can tell apart.
INK, PAPER, LINE = "#24292f", "#ffffff", "#8c959f"
BLUE, ORANGE, GREEN, SKY, GREY = "#0072b2", "#e69f00", "#009e73", "#9fd3f2", "#d0d7de"

# Bytes of 256 values as (name, bytes, color), for each recipe with a message of its own.
MESSAGES: dict[str, tuple[str, list[tuple[str, float, str]]]] = {
    "bf16": ("256 values of 16 bits", [("bf16", 512, BLUE)]),
    "fp16": ("256 values of 16 bits; one power-of-two scale for the whole message", [("fp16", 512, BLUE)]),
    "int8": ("one bf16 scale, 256 integers of 8 bits", [("scale", 2, ORANGE), ("int8", 256, BLUE)]),
    "fp8": ("one bf16 scale, 256 floats of 8 bits (e4m3)", [("scale", 2, ORANGE), ("e4m3", 256, BLUE)]),
    "int4": ("two bf16 scales, 256 integers of 4 bits", [("scales", 4, ORANGE), ("int4", 128, BLUE)]),
    "int3": (
        "256 of 1024 values that were rotated together: a quarter of a scale, 256 codes of 3 bits",
        [("scale", 0.5, ORANGE), ("3 bits", 96, BLUE)],
    ),
    "int2": (
        "256 of 1024 values that were rotated together: a quarter of a scale, 256 codes of 2 bits",
        [("scale", 0.5, ORANGE), ("2 bits", 64, BLUE)],
    ),
    "topk": (
        "8 of 256 values, the largest of 1024: a quarter of a scale, places of 10 bits, codes of 4 bits",
        [("scale", 0.5, ORANGE), ("places", 10, GREEN), ("codes", 4, BLUE)],
    ),
    "sign": (
        "256 of 1024 values that were rotated together: a quarter of a scale, 256 signs",
        [("scale", 0.5, ORANGE), ("signs", 32, BLUE)],
    ),
}


class Drawing:
    """The elements of an SVG, in the order in which they are painted."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="sans-serif" font-size="14" fill="{INK}"><title>{escape(title)}</title>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>'
        )
        self._lines: list[str] = []

    def text(self, x: float, y: float, words: str, *, anchor: str = "middle", bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._lines.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, words: str = "") -> None:
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
            f'stroke="{INK}" stroke-width="0.8"/>'
        )
        if words:
            color = f' fill="{PAPER}"' if fill in (BLUE, GREEN) else ""
            middle = f'x="{x + width / 2:g}" y="{y + height / 2 + 5:g}" text-anchor="middle"'
            self._lines.append(f"<text {middle}{color}>{escape(words)}</text>")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._lines.append(f'<path d="M{x1:g} {y1:g} {x2:g} {y2:g}" stroke="{INK}" marker-end="url(#tip)"/>')

    def __str__(self) -> str:
        return "\n".join([self._head, *self._lines, "</svg>\n"])


def draw_message(recipe: str) -> Drawing:
    """Draw the bytes of 256 values, as fp32 and as the recipe sends them."""
    words, parts = MESSAGES[recipe]
    left, wide = 90, 640
    drawing = Drawing(760, 150, f"What {recipe} sends of 256 values")
    drawing.text(left - 10, 45, "fp32", anchor="end", bold=True)
    drawing.box(left, 24, wide, 32, GREY, "1024 bytes")
    drawing.text(left - 10, 99, recipe, anchor="end", bold=True)
    x: float = left
    for _, num_bytes, color in parts:
        width = max(num_bytes / 1024 * wide, 3.0)
        drawing.box(x, 78, width, 32, color)
        x += width
    num_bytes = sum(part[1] for part in parts)
    drawing.text(x + 10, 99, f"{num_bytes:g} bytes", anchor="start")
    drawing.text(left, 136, words, anchor="start")
    return drawing


def draw_attach() -> Drawing:
    """Draw the way of a bucket: what DDP does, and what gradwire does in place of its allreduce."""
    drawing = Drawing(760, 250, "What attach changes")
    drawing.text(20, 28, "on every rank, during backward()", anchor="start", bold=True)
    for x, words in ((20, "gradients"), (170, "DDP's bucket")):
        drawing.box(x, 50, 120, 44, GREY, words)
    drawing.arrow(140, 72, 168, 72)
    drawing.box(620, 50, 120, 44, GREY, "optimizer")
    drawing.box(470, 50, 120, 44, GREY, "the average")
    drawing.arrow(590, 72, 618, 72)
    drawing.box(330, 40, 100, 28, PAPER, "allreduce")
    drawing.text(380, 86, "without gradwire")
    drawing.arrow(290, 60, 328, 56)
    drawing.arrow(430, 56, 468, 60)
    drawing.box(150, 140, 460, 62, SKY)
    for x, fill, words in ((165, BLUE, "encode"), (275, ORANGE, "send"), (385, GREEN, "sum in fp32")):
        drawing.box(x, 155, 90 if words != "sum in fp32" else 105, 32, fill, words)
    drawing.box(505, 155, 90, 32, BLUE, "decode")
    for x in (255, 365, 490):
        drawing.arrow(x, 171, x + (18 if x != 490 else 13), 171)
    drawing.arrow(230, 94, 210, 153)
    drawing.arrow(550, 153, 532, 96)
    drawing.text(380, 226, 'gradwire.attach(model, "int8"): on a thread or stream of its own')
    return drawing


def draw_two_shot() -> Drawing:
    """Draw the two rounds of messages in which ranks average a bucket."""
    drawing = Drawing(760, 360, "Two rounds: to the owner of a chunk, and back to all")
    colors = (BLUE, ORANGE, GREEN)
    for column, title in ((0, "each rank's gradients"), (1, "owners sum"), (2, "the same everywhere")):
        drawing.text(120 + 260 * column, 30, title, bold=True)
    for rank in range(3):
        y = 60 + 95 * rank
        drawing.text(12, y + 22, f"{rank}", anchor="start", bold=True)
        for chunk, color in enumerate(colors):
            drawing.box(40 + 54 * chunk, y, 50, 34, color, f"{rank}{'abc'[chunk]}")
        drawing.box(330, y, 110, 34, colors[rank], f"sum of {'abc'[rank]}")
        for chunk, color in enumerate(colors):
            drawing.box(560 + 54 * chunk, y, 50, 34, color, f"{'abc'[chunk]}")
    for rank in range(3):
        for owner in range(3):
            drawing.arrow(205, 77 + 95 * rank, 326, 77 + 95 * owner)
            drawing.arrow(442, 77 + 95 * owner, 556, 77 + 95 * rank)
    drawing.text(265, 345, "round 1: chunks, encoded")
    drawing.text(500, 345, "round 2: sums, encoded once")
    return drawing


def draw_low_rank() -> Drawing:
    """Draw a gradient matrix, its two factors, and what is left for the next step."""
    drawing = Drawing(760, 240, "A matrix as two factors")
    drawing.box(30, 50, 180, 130, GREY, "gradient, n x m")
    drawing.text(235, 120, "≈", bold=True)
    drawing.box(260, 50, 26, 130, BLUE)
    drawing.text(273, 200, "n x r")
    drawing.text(305, 120, "·", bold=True)
    drawing.box(322, 100, 180, 26, BLUE)
    drawing.text(412, 148, "r x m")
    drawing.text(525, 120, "+", bold=True)
    drawing.box(548, 50, 180, 130, PAPER, "residual")
    drawing.text(380, 30, "travels", bold=True)
    drawing.text(638, 30, "stays for the next step", bold=True)
    drawing.text(120, 30, "one rank's, this step", bold=True)
    drawing.text(380, 228, "n = m = 1000, r = 4: 8000 values instead of 1,000,000")
    return drawing


def drawings() -> Iterator[tuple[Path, str]]:
    """Yield each file with its content."""
    for name, drawing in (
        ("attach", draw_attach()),
        ("two-shot", draw_two_shot()),
        ("low-rank", draw_low_rank()),
        *((f"recipes/{recipe}", draw_message(recipe)) for recipe in MESSAGES),
    ):
        yield DOCS / f"{name}.svg", str(drawing)


if __name__ == "__main__":
    for path, content in drawings():
        path.write_text(content)
