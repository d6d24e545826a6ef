"""The states of all ranks on every rank, for programs that save on one rank alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.averaging.checkpoint import merge_state_dicts
from gradwire.buckets import dtype_named
from gradwire.peers import CollectiveCall


def gather_states(
    state: dict[str, Any], group: dist.ProcessGroup, timeout: timedelta, caller: str
) -> dict[str, Any]:
    """Return `merge_state_dicts` of every rank's state, with tensors on CPU; collective."""
    with CollectiveCall(group, timeout, caller) as call:
        call.agree({"the step": str(state["step"])})
    states: list[Any] = [None] * group.size()
    # On CPU: a pickled CUDA tensor would be loaded to the device of the rank that it comes from.
    dist.all_gather_object(states, _on_cpu(state), group=group)
    _add_missing_residuals(states)
    return merge_state_dicts(states)


def _add_missing_residuals(states: Sequence[dict[str, Any]]) -> None:
    """Give all states the same residuals: a rank that has joined later has held back nothing so far."""
    everyones = [entry for state in states for entry in state["entries"]]
    shapes = {(key, name): shape for key, name, shape in everyones if key.startswith("residual:")}
    for state in states:
        for memory in state["memory"].values():
            for (key, name), shape in shapes.items():
                zeros = torch.zeros(shape, dtype=dtype_named(key.rpartition(":")[2]))
                memory.setdefault(key, {}).setdefault(name, zeros)
        own = {(key, name): shape for key, name, shape in state["entries"]}
        state["entries"] = sorted([key, name, shape] for (key, name), shape in {**shapes, **own}.items())


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _on_cpu(each) for key, each in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value
