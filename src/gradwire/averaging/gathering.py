"""The states of all ranks on every rank, for programs that save on one rank alone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire.averaging.checkpoint import merge_state_dicts
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
    return merge_state_dicts(states)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _on_cpu(each) for key, each in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value
