"""Models, clocks, comparisons and names for the tests of recipe `auto`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.tuning.policy import NUM_SETTLING, NUM_TIMED
from gradwire.tuning.times import StepTimer, Times
from gradwire.tuning.tuner import Tuner

FIRST = NUM_SETTLING + NUM_TIMED - 1
SLOW, HIDDEN = Times(1.0, 0.9, 0.9), Times(1.0, 0.001, 0.5)


class Net(nn.Module):
    """Layers whose gradients differ in size by a factor of thousands, with small parameters between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(160, 160) for _ in range(4)])
        self.head = nn.Linear(160, 3)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = x + 10.0**-number * layer(x).tanh()
        return self.head(x)


def make(spec, times=SLOW, **options):
    """Return a DDP model, its optimizer and its wire; its steps seem to take ``times``."""
    pretend(times)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.15, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.05), gradwire.attach(model, spec)


def train(model, optimizer, steps, spoil=()):
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        batch = torch.randn(6, 160)
        if step in spoil and dist.get_rank() == 0:
            batch[0, 0] = float("inf")
        model(batch).square().mean().backward()
        if step not in spoil:
            optimizer.step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def pretend(steps=SLOW):
    """Let steps seem to take these times, and measuring cost nothing."""
    StepTimer.read = lambda timer: steps() if callable(steps) else steps
    Tuner.looking = 0.0


def require_same_everywhere(*values):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    assert everyone.count(everyone[0]) == len(everyone), everyone


def unit_of(name):
    """Return the unit of a parameter of `shard`'s models: its block, or the rest."""
    return name.rpartition(".")[0].rpartition(".")[0] if name.startswith("blocks.") else ""


def encodings_by_unit(decision):
    found = {}
    for name, encoding in decision.encodings.items():
        found.setdefault(unit_of(name), set()).add(encoding)
    return found
