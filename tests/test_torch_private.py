"""Private names of torch stand in one package, and the installed torch has them."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.torch_private import PRIVATE_NAMES, backend_of, fsdp, missing_names
from gradwire.torch_private.names import KINDS, PrivateName

ROOT = Path(gradwire.__file__).parent
PRIVATE = re.compile(r"_[a-zA-Z]")
# Names of Python and numba.
OTHERS = {
    "_cache",
    "_cache_file",
    "_current_exceptions",
    "_current_frames",
    "_exit",
    "_getframe",
    "_getvalue",
    "_run_exitfuncs",
    "_source_stamp",
}


# Files that offer private names of torch to their users, as torch does.
DROP_INS = [ROOT / "ddp_comm_hooks" / f"{name}_hooks.py" for name in ("mixed_precision", "optimizer_overlap")]


def names_of_ours(tree):
    """Private names that a file gives to things of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def private_uses(tree):
    """Private attributes and imports of torch in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "torch":
            yield from filter(PRIVATE.match, [*node.module.split("."), *(alias.name for alias in node.names)])


def test_no_other_file_uses_private_names_of_torch():
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        if path.parent.name != "torch_private" and path not in DROP_INS
        for name in set(private_uses(tree)) - set(names_of_ours(tree)) - OTHERS
    }
    assert not found, "call gradwire.torch_private instead"


def private_words(tree):
    """Private names in a file, as identifiers or as text, but for the names of the file's own things."""
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    own |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        is_plain = isinstance(node, ast.Name | ast.FunctionDef | ast.ClassDef)
        # Every text in every field of every node: attributes, keywords, imports, arguments of getattr.
        fields = [field for _, field in ast.iter_fields(node)]
        values = [each for field in fields for each in (field if isinstance(field, list) else [field])]
        yield from words_of(values) - (own if is_plain else set())


def words_of(values):
    texts = [value for value in values if isinstance(value, str) and re.fullmatch(r"[\w.:]+", value)]
    return {word for text in texts for word in re.split("[.:]", text) if PRIVATE.match(word)}


# Functions that take a name, and its place among their arguments.
BY_NAME = {
    **dict.fromkeys(("getattr", "setattr", "hasattr", "delattr"), 1),
    **dict.fromkeys(("attrgetter", "methodcaller", "import_module"), 0),
}


def composed_names(tree):
    """Calls that reach an attribute whose name stands nowhere as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", None))
            if called in BY_NAME and not isinstance(node.args[BY_NAME[called]], ast.Constant | ast.Name):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "source",
    [
        "thing._secret",
        "thing.more()._secret.public = 1",
        "getattr(thing, '_secret', None)",
        "for name in ('public', '_secret'): setattr(thing, name, 1)",
        "Stand(_secret=1)",
        "from torch._secret import public",
        "from torch import _secret as public",
        "import torch._secret.public as public",
        "import_module('torch._secret')",
        "_secret = thing._secret",
        "def _secret(): return thing._secret",
    ],
)
def test_a_private_name_is_found_wherever_it_stands(source):
    assert set(private_words(ast.parse(source))) == {"_secret"}


def test_names_of_ours_and_composed_ones_are_told_from_those_of_torch():
    assert not set(private_words(ast.parse("_ours = 1\ndef _own(): return _ours + __name__")))
    assert list(composed_names(ast.parse("getattr(thing, '_sec' + 'ret')")))
    assert list(composed_names(ast.parse("getattr(thing, f'_{name}')")))


def test_every_private_name_that_the_package_uses_is_listed():
    listed = words_of([private.path for private in PRIVATE_NAMES])
    files = [*(ROOT / "torch_private").glob("*.py")]
    trees = {path.name: ast.parse(path.read_text()) for path in files}
    assert len(trees) > 6
    found = {f"{name}: {word}" for name, tree in trees.items() for word in set(private_words(tree)) - listed}
    assert not found, "add a row to the file's names, with its purpose and its replacement"
    assert not [call for tree in trees.values() for call in composed_names(tree)]


def test_every_private_name_has_a_purpose_and_a_replacement():
    paths = [private.path for private in PRIVATE_NAMES]
    assert len(paths) == len(set(paths))
    assert all(private.purpose and private.instead for private in PRIVATE_NAMES)


def look(rank):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    with model.join():  # which sets one of them
        model(torch.ones(1, 2)).sum().backward()
    group = dist.group.WORLD
    options = backend_of(group, torch.device("cpu")).options
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    sharded = fully_shard(torch.nn.Linear(2, 2))
    sharded(torch.ones(1, 2))  # which sets one of them
    (param_group,) = fsdp.param_groups(sharded)
    more = {"param_group": param_group, "fsdp_param": param_group.fsdp_params[0]}
    more |= {"sharded": sharded, "fsdp_state": sharded._get_fsdp_state()}
    more |= {"scaler": torch.amp.GradScaler("cpu"), "compiled": torch.compile(torch.nn.Linear(2, 2))}
    stepped = torch.nn.Parameter(torch.ones(2))
    _apply_optimizer_in_backward(torch.optim.SGD, [stepped], {"lr": 0.1})
    more["stepped"] = stepped
    assert {"group", "options", "ddp", "zero", *more} == set(KINDS)
    missing = missing_names(group=group, options=options, ddp=model, zero=zero, **more)
    assert not missing, f"torch {torch.__version__} lacks {[private.path for private in missing]}"


def test_the_installed_torch_has_every_private_name(two_ranks):
    two_ranks.run(look)
    objects = dict.fromkeys(KINDS, object())
    assert {private.path.partition(":")[0] for private in missing_names(**objects)} == objects.keys()


def test_a_name_is_expected_in_the_versions_that_have_it():
    private = PrivateName("torch:_it", "an example", "nothing", since=(2, 6), before=(2, 12))
    expected = [minor for minor in range(4, 16) if private.is_expected_in((2, minor))]
    assert expected == [*range(6, 12)]


def test_a_name_that_torch_lacks_is_told(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_copy_")
    assert [private.path for private in missing_names()] == ["torch:_foreach_copy_"]
