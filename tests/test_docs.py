"""The examples of the documentation run as they are."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.testing import run_ranks
from tests.cpu_events import NoEvent

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ["local_sgd", "overlap", "zero", "mixed_precision", "powersgd", "reliability", "telemetry"]


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


@pytest.mark.parametrize("page", PAGES)
def test_the_example_of_a_page_runs_and_leaves_ranks_the_same(page):
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert run_ranks(job_example, 2, args=(example, "cuda" in example)) == [[True, True]] * 2
