"""The proposal of recipe ``auto`` for the model that a benchmark has trained."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.buckets import trainable_parameters
from gradwire.headroom.records import Proposal
from gradwire.peers import NcclGroup, join_rendezvous, open_gloo, timeout_of, uses_nccl
from gradwire.recipes import resolve_for_module
from gradwire.tuning import propose


def propose_encodings(wire: gradwire.Wire, group: dist.ProcessGroup, budget: float) -> Proposal:
    """Return what ``auto`` would send for the last gradients of a wire with recipe ``noop``; collective."""
    module = wire.model.module
    assert isinstance(module, nn.Module)
    parameters = {name: p for name, p in trainable_parameters(module).items() if p.grad is not None}
    recipe = gradwire.recipe(f"auto:budget={budget:g}")
    tuning = resolve_for_module(recipe, module, parameters, group.size()).tuning
    assert tuning is not None
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    device = next(iter(gradients.values())).device
    rendezvous = join_rendezvous(group, timeout_of(group), "headroom.propose_encodings")
    peers = NcclGroup(group) if uses_nccl(group, device) else open_gloo(group, rendezvous)
    try:
        choice = propose(gradients, wire.layout(), tuning, peers)
    finally:
        peers.close()
    counts = Counter(choice.encodings.values())
    return Proposal(str(recipe), choice.num_bytes, choice.error, tuple(sorted(counts.items())))
