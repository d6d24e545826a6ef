"""`import gradwire` is quick, and still offers every public name."""

import inspect
import subprocess
import sys

import pytest

import gradwire

LOOK = """
import sys
import torch.nn.parallel
before = set(sys.modules)
import gradwire
print(*sorted(set(sys.modules) - before))
gradwire.attach, gradwire.Averager, gradwire.LocalSGD, gradwire.recipe("int4")
print(*sorted(sys.modules))
"""


def test_importing_gradwire_imports_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=300, check=True
    )
    at_once, later = done.stdout.splitlines()
    assert set(at_once.split()) == {"gradwire", "gradwire.version"}
    assert "gradwire.ddp" in later.split()
    assert not {"numba", "rich", "typer", "plotly"} & set(later.split())


def test_every_public_name_is_found():
    for name in gradwire.__all__:
        assert getattr(gradwire, name) is not None, name
        assert name in dir(gradwire)
    homes = [name for names in gradwire._HOMES.values() for name in names]
    assert sorted([*homes, "__version__"]) == sorted(gradwire.__all__)


def test_every_recipe_is_a_public_function_that_returns_it():
    for name, factory in gradwire.RECIPES.items():
        assert name in gradwire.__all__
        assert getattr(gradwire, name) is factory
        assert getattr(gradwire, name)() == gradwire.recipe(name)


def test_public_modules_need_no_import_of_their_own():
    look = "import gradwire as g; g.testing.run_ranks, g.lab.Lab, g.ddp_comm_hooks.DDPCommHookType"
    subprocess.run([sys.executable, "-c", look], timeout=300, check=True)


def test_a_wrong_name_is_told():
    with pytest.raises(AttributeError, match="^module 'gradwire' has no attribute 'atach'$"):
        gradwire.atach()


def test_every_public_name_has_an_example_that_runs():
    lacking = [
        name
        for name in gradwire.__all__
        if callable(getattr(gradwire, name)) and ">>> " not in (inspect.getdoc(getattr(gradwire, name)) or "")
    ]
    assert not lacking
