"""Short tables for users have the figures of the full ones on the pages of details."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
KERNELS = ("encode", "decode", "decode, add, encode")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def tables(page):
    """All tables of a page: the heading above, the names of columns, and the rows."""
    heading, text = "", (DOCS / page).read_text()
    for block in re.findall(r"^#+ .*$|(?:^\|.*\n)+", text, re.MULTILINE):
        if block.startswith("#"):
            heading = block.lstrip("# ")
        else:
            names, _, *rows = map(cells, block.splitlines())
            yield heading, names, rows


def pairs(page):
    """Each table of a page with the one of the same rows below the same heading of the page of details."""
    full = {(heading, names[0]): (names, rows) for heading, names, rows in tables(f"{page}-details.md")}
    for heading, names, rows in tables(f"{page}.md"):
        if (heading, names[0]) in full:
            yield heading, names, rows, *full[heading, names[0]]


@pytest.mark.parametrize(
    ("page", "headings"),
    [
        ("performance", ["100 Mbit/s", "1 Gbit/s", "Loopback", "GPU"]),
        ("fidelity", ["25 M parameters, AdamW", "25 M parameters, SGD"]),
    ],
)
def test_short_tables_have_the_figures_of_the_full_ones(page, headings):
    found = list(pairs(page))
    assert [heading for heading, *_ in found] == headings
    for heading, names, rows, all_names, all_rows in found:
        columns = [all_names.index(name) for name in names]
        known = [[row[column] for column in columns] for row in all_rows]
        assert len(rows) > 5, heading
        assert not [row for row in rows if row not in known], heading


def kernels_in_full():
    """Bandwidth on CUDA, and time on each CPU, over those of a copy, by kernel."""
    text = (DOCS / "performance-details.md").read_text().partition("\n## Kernels\n")[2]
    cuda, xeon, epyc = re.split(r"\n### CPU\n|\nAMD EPYC", text)
    found = {("CUDA", *row): figure for row, figure in cuda_kernels(cuda)}
    for machine, listing in {"Intel Xeon": xeon, "AMD EPYC": epyc}.items():
        for name, kernel, figure in re.findall(r"^(\S+) +(\D+?) +[\d.]+ +([\d.]+)$", listing, re.MULTILINE):
            found[machine, f"`{name}`", kernel] = figure
    return found


def cuda_kernels(text):
    for name, kernel, rest in re.findall(r"^\| (`\S+`) ([a-z, ]+) \|(.*)\|$", text, re.MULTILINE):
        yield (name, kernel), cells(rest)[2]
    figure = r" ([\d.]+) \|"
    for name, *figures in re.findall(rf"^\| (`\S+`) \|{3 * figure}$", text, re.MULTILINE):
        yield from zip([(name, kernel) for kernel in KERNELS], figures, strict=True)


def test_kernels_have_the_figures_of_the_full_tables():
    known, num_rows = kernels_in_full(), 0
    for heading, names, rows in tables("performance.md"):
        if heading in ("CUDA", "CPU"):
            for name, *rest in rows:
                assert tuple(names[-3:]) == KERNELS
                machine, figures = (rest[0], rest[1:]) if "machine" in names else ("CUDA", rest)
                assert figures == [known[machine, name, kernel] for kernel in KERNELS], name
                num_rows += 1
    assert num_rows == 14
