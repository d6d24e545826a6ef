"""Rules for every Markdown page: short lines, links that resolve, names that exist."""

import importlib
import importlib.util
import itertools
import re
from pathlib import Path

import pytest
from typer.main import get_command

import gradwire
from gradwire.adapters.adapted_wire import AdaptedWire
from gradwire.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAX_COLUMNS = 120
MAX_CHANGELOG_LINES = 60
FOLDERS = ("benchmarks", "docs", "examples", "src", "tests")
# benchmarks/convergence.py writes its tables, one run a row.
HAS_GENERATED_TABLES = {"fidelity-details.md"}
COMMANDS = get_command(app).commands

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def headings(page):
    """The anchors of a page, made from its headings as GitHub does."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def resolve(name):
    """Import the longest module that a dotted name begins with, and get the rest from it."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            if i == len(parts) and _is_adapter(name):
                return None  # its framework is not installed here
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def _is_adapter(name):
    """True if this is an adapter, or a class or function in one; their frameworks may be missing here."""
    found = re.fullmatch(r"(gradwire\.adapters\.\w+)(?:\.(\w+))?", name)
    spec = importlib.util.find_spec(found[1]) if found else None
    if spec is None or found[2] is None:
        return spec is not None
    return bool(re.search(rf"^(class|def) {found[2]}\b", Path(spec.origin).read_text(), re.MULTILINE))


@each_page
def test_lines_fit_in_120_columns(page):
    long = [
        f"{page.name}:{number}: {line}"
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
        if not (page.name in HAS_GENERATED_TABLES and line.startswith("|"))
    ]
    assert not long, "\n".join(long)


@each_page
def test_links_between_pages_resolve(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.is_file() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert not broken, broken


@each_page
def test_names_of_gradwire_exist(page):
    names = set(re.findall(r"\bgradwire(?:\.[A-Za-z_]\w*)+", page.read_text()))
    missing = []
    for name in sorted(names):
        try:
            resolve(name)
        except (AttributeError, ModuleNotFoundError):
            missing.append(name)
    assert not missing, missing


@each_page
def test_methods_of_a_wire_exist(page):
    methods = set(re.findall(r"\bwire\.(\w+)\(", page.read_text()))
    assert not {
        name for name in methods if not any(hasattr(kind, name) for kind in (gradwire.Wire, AdaptedWire))
    }


def unknown_options(text):
    """The options in a text that the command before them does not have."""
    for name, rest in re.findall(r"\bgradwire[ .](\w+)((?: +[^\s`#|]+)*)", text.replace("\\\n", " ")):
        # Words after a script are its own.
        words = itertools.takewhile(lambda word: word != "--" and not word.endswith(".py"), rest.split())
        if name in COMMANDS:
            known = [
                option for each in COMMANDS[name].params for option in (*each.opts, *each.secondary_opts)
            ]
            given = [found[0] for word in words if (found := re.match(r"--?[a-z][a-z-]*", word))]
            yield from (f"gradwire {name} {option}" for option in given if option not in (*known, "--help"))


@each_page
def test_commands_have_the_options_that_they_are_given(page):
    assert not list(unknown_options(page.read_text()))


def test_an_option_that_a_command_lacks_is_found():
    assert list(unknown_options("`gradwire run --recipes int4 -- train.py --lr 1`")) == [
        "gradwire run --recipes"
    ]


@each_page
def test_files_of_the_repository_exist(page):
    paths = set(re.findall(rf"(?<![\w/])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", page.read_text()))
    assert not {path for path in paths if not (ROOT / path).exists()}


@each_page
def test_recipes_with_options_are_spelled_as_gradwire_reads_them(page):
    names = "|".join(gradwire.RECIPES)
    for text in set(
        re.findall(rf"`\"?((?:{names}):[^`\"]+|(?:route|schedule)\([^`\"]+\))\"?`", page.read_text())
    ):
        gradwire.recipe(text)


def test_packages_that_contributors_are_sent_to_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`([\w/]+/(?:\w+\.py)?)`", text)
    assert len(paths) > 10
    assert not [
        path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / "src/gradwire"))
    ]


def test_the_newest_changes_are_short_enough_to_read():
    newest = (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].partition("\n## ")[0]
    assert newest.startswith(gradwire.__version__)
    assert len(newest.splitlines()) <= MAX_CHANGELOG_LINES
