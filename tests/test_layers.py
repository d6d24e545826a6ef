"""Imports point one way through the house."""

import ast
import re
from pathlib import Path

import gradwire

ROOT = Path(gradwire.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
# From the ground up, as the page's table has them; a room may import those above it, and itself.
FLOORS = [
    room
    for row in PAGE.read_text().partition("## Rooms")[2].partition("##")[0].splitlines()
    if row.startswith("| `")
    for room in re.findall(r"`(\w+)`", row.split("|")[1])
]


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "gradwire"


def imports(path: Path):
    """Every module of ours that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room they enter"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = submodules if node.module == "gradwire" else [node.module]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "gradwire")


def test_every_module_has_a_floor():
    rooms = {
        path.stem if path.parent == ROOT else path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")
    }
    assert len(FLOORS) == len(set(FLOORS)), "a room has one place"
    assert rooms - {"__init__"} <= set(FLOORS), "a new room needs a place in the table"
    assert set(FLOORS) - {"gradwire"} <= rooms, "a room in the table is gone"


def test_imports_point_one_way():
    upward = []
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        room = "gradwire" if parts == ("__init__",) else parts[0]
        for name in imports(path):
            # `from gradwire import ops` enters a room, `from gradwire import attach` the front door.
            target = room_of(name) if room_of(name) in FLOORS else "gradwire"
            if FLOORS.index(target) > FLOORS.index(room):
                upward.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not upward, upward
