"""Facts about a torch process group, and bytes that its ranks gather over it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

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


def all_gather_bytes(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return the bytes of every rank, of any length, over torch's own group; collective.

    Unlike ``all_gather_object``, it unpickles nothing.
    """
    types = [device.type for device in device_types(group)]
    device = torch.device("cpu" if "cpu" in types else types[0])
    sizes = _all_gather(torch.tensor([len(own)], device=device), group)
    longest = max(int(size) for size in sizes)
    row = torch.zeros(max(longest, 1), dtype=torch.uint8)
    row[: len(own)] = torch.tensor(bytearray(own), dtype=torch.uint8)
    rows = _all_gather(row.to(device), group)
    return [row[: int(size)].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def _all_gather(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    return everyone
