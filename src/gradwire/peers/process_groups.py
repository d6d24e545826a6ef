"""Facts about a torch process group: its backend and its timeout."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.torch_private import backend_of, device_types, timeout_of_backend


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that serves tensors on ``device``, in lower case."""
    return str(backend_of(group, device).name()).lower()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's own collectives."""
    for device in device_types(group):
        timeout = timeout_of_backend(backend_of(group, device))
        if timeout is not None:
            return timeout
    return dist.default_pg_timeout


def uses_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if ``group`` exchanges tensors on ``device`` by NCCL."""
    return device.type == "cuda" and backend_name(group, device) == "nccl"
