"""Private names of torch stand in one package, and the installed torch has them."""

import ast
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.torch_private import PRIVATE_NAMES, backend_of, fsdp, missing_names

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
    (param_group,) = fsdp.param_groups(fully_shard(torch.nn.Linear(2, 2)))
    more = {"param_group": param_group, "fsdp_param": param_group.fsdp_params[0]}
    more["scaler"] = torch.amp.GradScaler("cpu")
    missing = missing_names(group=group, options=options, ddp=model, zero=zero, **more)
    assert not missing, f"torch {torch.__version__} lacks {[private.path for private in missing]}"


def test_the_installed_torch_has_every_private_name(two_ranks):
    two_ranks.run(look)
    kinds = "group", "options", "ddp", "zero", "scaler", "param_group", "fsdp_param"
    objects = dict.fromkeys(kinds, object())
    assert {private.path.partition(":")[0] for private in missing_names(**objects)} == objects.keys()


def test_a_name_that_torch_lacks_is_told(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_copy_")
    assert [private.path for private in missing_names()] == ["torch:_foreach_copy_"]
