"""Imports between packages point one way, and enter packages through their fronts."""

import ast
import re
from pathlib import Path

import gradwire

ROOT = Path(gradwire.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
# In the order of the page's table: a package may import those above it, and itself.
ORDER = [
    name
    for row in PAGE.read_text().partition("## Packages")[2].partition("\n## ")[0].splitlines()
    if row.startswith("| `")
    for name in re.findall(r"`(\w+)`", row.split("|")[1])
]
# The only packages that may know DistributedDataParallel.
KNOW_DDP = {"ddp", "ddp_comm_hooks", "adapters"}
PATHS = sorted(ROOT.rglob("*.py"))


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "gradwire" if parts == ("__init__",) else parts[0]


def imports(path: Path):
    """Every module of ours that a file imports, also inside functions, and the name taken from it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "gradwire")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which package they enter"
            if node.module.split(".")[0] == "gradwire":
                yield from ((node.module, alias.name) for alias in node.names)


def target_of(module: str, name: str | None) -> str:
    """The package that an import enters; `from gradwire import attach` enters the package's own front."""
    parts = module.split(".")
    if len(parts) > 1:
        return parts[1]
    return name if name in ORDER else "gradwire"


def test_every_package_is_in_the_table():
    found = {package_of(path) for path in PATHS}
    assert len(ORDER) == len(set(ORDER)), "a package stands in the table once"
    assert found <= set(ORDER), "a new package needs a line in the table"
    assert set(ORDER) <= found, "a package in the table is gone"


def test_few_modules_lie_at_the_root():
    modules = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= 3, modules


def test_imports_point_one_way():
    upward = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in PATHS
        for module, name in imports(path)
        if ORDER.index(target_of(module, name)) > ORDER.index(package_of(path))
    ]
    assert not upward, upward


def test_packages_are_entered_through_their_fronts():
    sideways = [
        f"{path.relative_to(ROOT)} imports {name} from {module}"
        for path in PATHS
        for module, name in imports(path)
        if module.count(".") > 1 and module.split(".")[1] != package_of(path)
    ]
    assert not sideways, sideways


def test_every_package_says_what_belongs_there():
    for front in sorted(ROOT.glob("*/__init__.py")):
        docstring = ast.get_docstring(ast.parse(front.read_text())) or ""
        assert len(docstring) > 40, f"{front.parent.name} does not say what belongs there"


def test_nothing_but_ddp_and_what_stands_on_it_knows_ddp():
    knowing = [
        str(path.relative_to(ROOT))
        for path in PATHS
        if package_of(path) not in KNOW_DDP
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
        if alias.name.rpartition(".")[2] == "DistributedDataParallel"
    ]
    assert not knowing, knowing


def test_nothing_is_pickled_over_the_wire():
    for path in PATHS:
        if path.parent.name not in ("testing", "ranks"):  # these talk to processes that they have started
            calls = [
                node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
            ]
            names = [call.attr for call in calls if isinstance(call, ast.Attribute)]
            assert not [name for name in names if name.endswith(("_object", "_object_list"))], path
