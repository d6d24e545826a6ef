"""Every Python block of every page runs as it stands."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.testing import run_ranks
from tests.cpu_events import NoEvent
from tests.lab_machine import needs_lab

DOCS = Path(__file__).parent.parent / "docs"
PAGES_ON_RANKS = [
    "auto",
    "hooks",
    "index",
    "local_sgd",
    "loops",
    "mixed_precision",
    "overlap",
    "powersgd",
    "quickstart",
    "reliability",
    "telemetry",
    "zero",
]


def example_of(page):
    """All Python blocks of a page, one after the other: later blocks use the names of earlier ones."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL))


def job_example(rank, example, needs_accelerator):
    # The ranks have a process group already.
    dist.init_process_group = dist.destroy_process_group = lambda *args: None
    if needs_accelerator and not torch.accelerator.is_available():
        torch.Event = torch.accelerator.current_stream = NoEvent
        torch.Tensor.cuda = nn.Module.cuda = lambda self: self
    names = {}
    exec(compile(example, "example", "exec"), names)
    model = names["model"]
    mine = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [torch.equal(mine, other) for other in everyone]


def test_every_page_with_python_is_run_here():
    paths = [path for path in DOCS.rglob("*.md") if "```python" in path.read_text()]
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in paths}
    assert pages == {*PAGES_ON_RANKS, "lab", "sharded", "testing"}


@pytest.mark.parametrize("page", PAGES_ON_RANKS)
def test_the_example_of_a_page_runs_and_leaves_ranks_the_same(page):
    example = example_of(page)
    assert run_ranks(job_example, 2, 240, args=(example, "cuda" in example)) == [[True, True]] * 2


def job_sharded(rank, example):
    dist.init_process_group = dist.destroy_process_group = lambda *args: None
    torch.manual_seed(rank)
    names = {}
    exec(compile(example, "example", "exec"), names)
    parameters = [p.detach().full_tensor().flatten() for p in names["model"].parameters()]
    mine = torch.cat(parameters)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert names["wire"].stats().num_steps == 3
    return all(torch.equal(mine, other) for other in everyone)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_example_of_sharded_models_runs_and_leaves_replicas_the_same(num_ranks):
    assert run_ranks(job_sharded, num_ranks, 240, args=(example_of("sharded"),)) == [True] * num_ranks


@pytest.mark.full
def test_the_tests_of_the_page_about_testing_pass(tmp_path, monkeypatch):
    (tmp_path / "page_about_testing.py").write_text(example_of("testing"))
    monkeypatch.syspath_prepend(tmp_path)  # ranks import its functions by name
    page = importlib.import_module("page_about_testing")
    tests = [value for name, value in vars(page).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


@needs_lab
def test_the_example_of_the_lab_measures_its_links(tmp_path):
    (tmp_path / "page.py").write_text(example_of("lab"))
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Mbit/s between one rank on each host" in done.stdout
