"""A program that never detaches still ends as it should."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
import torch.distributed as dist
import gradwire
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from gradwire.ddp_comm_hooks.default_hooks import bf16_compress_hook

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
how = sys.argv[3]
if how == "raw":
    model.register_comm_hook(None, bf16_compress_hook)
else:
    wire = gradwire.attach(model, allreduce_hook if how == "hook" else "bf16")
for _ in range(3):
    model(torch.randn(2, 50)).sum().backward()
if how == "destroy":
    dist.destroy_process_group()
"""


def run_two(tmp_path, how, attempt):
    store = tmp_path / f"store-{how}-{attempt}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(store), str(rank), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        for rank in range(2)
    ]
    try:
        return [(p.communicate(timeout=60)[0], p.returncode) for p in processes]
    finally:
        for p in processes:
            p.kill()


# Each way of ending has its own race with the interpreter, so `make test-full` tries more often.
@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 5))])
@pytest.mark.parametrize("how", ["recipe", "hook", "raw", "destroy"])
def test_a_program_that_never_detaches_ends_with_code_0_and_nothing_on_stderr(tmp_path, how, attempt):
    assert run_two(tmp_path, how, attempt) == [("", 0), ("", 0)]


def test_importing_gradwire_imports_no_numba():
    heavy = "{'numba', 'rich', 'typer'}"
    code = f"import gradwire, gradwire.ddp_comm_hooks, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_compile_where_no_cache_can_be_written(tmp_path):
    """A read-only install: numba refuses to cache, the kernels work all the same."""
    import shutil
    from pathlib import Path

    import gradwire

    copy = tmp_path / "site" / "gradwire"
    shutil.copytree(Path(gradwire.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = []\n"  # root may write anywhere, so no locator may be found
        "import torch, gradwire.ops as ops\n"
        "assert 'site' in ops.__file__\n"
        "assert ops.absmax(torch.tensor([1.0, -3.0])) == 3"
    )
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


def test_kernels_are_compiled_anew_when_a_file_they_use_has_changed(tmp_path, monkeypatch):
    import numba

    from gradwire.ops.cpu import compiling

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def hits():
        def twice(value):
            return 2 * value

        return sum(compiling.kernel((numba.float32,))(twice).stats.cache_hits.values())

    assert [hits(), hits()] == [0, 1]
    monkeypatch.setattr(compiling, "_sources", lambda: "of another version")
    assert [hits(), hits()] == [0, 1]
