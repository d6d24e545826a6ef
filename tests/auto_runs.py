"""Clocks, comparisons and names for the tests of recipe `auto` on shards."""

import torch.distributed as dist

from gradwire.tuning.policy import NUM_SETTLING, NUM_TIMED
from gradwire.tuning.times import StepTimer, Times
from gradwire.tuning.tuner import Tuner

FIRST = NUM_SETTLING + NUM_TIMED - 1
SLOW, HIDDEN = Times(1.0, 0.9, 0.9), Times(1.0, 0.001, 0.5)


def pretend(steps=SLOW):
    """Let steps seem to take these times, and measuring cost nothing."""
    StepTimer.read = lambda timer: steps() if callable(steps) else steps
    Tuner.looking = 0.0


def require_same_everywhere(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    assert everyone.count(everyone[0]) == len(everyone), everyone


def unit_of(name):
    """Return the unit of a parameter of `shard`'s models: its block, or the rest."""
    return name.rpartition(".")[0].rpartition(".")[0] if name.startswith("blocks.") else ""


def encodings_by_unit(decision):
    found = {}
    for name, encoding in decision.encodings.items():
        found.setdefault(unit_of(name), set()).add(encoding)
    return found
