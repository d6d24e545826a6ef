"""The states of all ranks on every rank, for programs that save on one rank alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.averaging.checkpoint import merge_state_dicts
from gradwire.buckets import as_real, dtype_name, dtype_named
from gradwire.peers import CollectiveCall, all_gather_bytes

# The key of a tensor's description; states have no such key.
_TENSOR = ""


def gather_states(
    state: dict[str, Any], group: dist.ProcessGroup, timeout: timedelta, caller: str
) -> dict[str, Any]:
    """Return `merge_state_dicts` of every rank's state, with tensors on CPU; collective."""
    with CollectiveCall(group, timeout, caller) as call:
        call.agree({"the step": str(state["step"])})
    states = map(_unpack, all_gather_bytes(_pack(state), group))
    return merge_state_dicts(states)


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
    values = torch.tensor(bytearray(data[begin:]), dtype=torch.uint8)

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
