"""The states of all ranks on every rank, for programs that save on one rank alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.averaging.checkpoint import merge_state_dicts
from gradwire.buckets import as_real, dtype_name, dtype_named, is_gradient_state
from gradwire.peers import CollectiveCall, all_gather_bytes, bytes_tensor

# The key of a tensor's description; states have no such key.
_TENSOR = ""


def gather_states(
    state: dict[str, Any], group: dist.ProcessGroup, timeout: timedelta, caller: str
) -> dict[str, Any]:
    """Return `merge_state_dicts` of every rank's state, with tensors on CPU; collective."""
    with CollectiveCall(group, timeout, caller) as call:
        call.agree({"the step": str(state["step"])})
    states = [_unpack(data) for data in all_gather_bytes(_pack(state), group)]
    _add_missing_residuals(states)
    return merge_state_dicts(states)


def _add_missing_residuals(states: Sequence[dict[str, Any]]) -> None:
    """Give all states the same residuals and velocities: a rank that has joined later has none so far."""
    everyones = [entry for state in states for entry in state["entries"]]
    shapes = {(key, name): shape for key, name, shape in everyones if is_gradient_state(key)}
    for state in states:
        for memory in state["memory"].values():
            for (key, name), shape in shapes.items():
                zeros = torch.zeros(shape, dtype=dtype_named(key.rpartition(":")[2]))
                memory.setdefault(key, {}).setdefault(name, zeros)
        own = {(key, name): shape for key, name, shape in state["entries"]}
        state["entries"] = sorted([key, name, shape] for (key, name), shape in {**shapes, **own}.items())


def _pack(state: Mapping[str, Any]) -> bytes:
    """Return a state as bytes: the length of a JSON text, the text, and the values of its tensors."""
    values: list[bytes] = []

    def describe(part: Any) -> Any:
        if isinstance(part, Tensor):
            flat = as_real(part.detach().cpu().flatten())
            values.append(flat.view(torch.uint8).numpy().tobytes())
            return {_TENSOR: [dtype_name(part.dtype), *part.shape]}
        return {key: describe(each) for key, each in part.items()} if isinstance(part, Mapping) else part

    text = json.dumps(describe(state)).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *values])


def _unpack(data: bytes) -> dict[str, Any]:
    """Return the state that `_pack` has packed, with tensors on CPU."""
    begin = 8 + int.from_bytes(data[:8], "little")
    values = bytes_tensor(data[begin:])

    def restore(part: Any) -> Any:
        nonlocal values
        if not isinstance(part, dict):
            return part
        if _TENSOR not in part:
            return {key: restore(each) for key, each in part.items()}
        name, *shape = part[_TENSOR]
        tensor = torch.empty(shape, dtype=dtype_named(name))
        own, values = values.tensor_split([tensor.numel() * tensor.element_size()])
        as_real(tensor.view(-1)).view(torch.uint8).copy_(own)
        return tensor

    state: dict[str, Any] = restore(json.loads(data[8:begin]))
    return state
