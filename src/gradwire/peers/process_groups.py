"""Process groups: facts about one of torch's, and groups beside torch's world."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.torch_private import Store, backend_of, device_types, gloo_group, timeout_of_backend


def make_group(store: Store, rank: int, size: int, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a Gloo process group over a store; collective over its ranks.

    torch's world need not exist, and processes of any world may be in it. So members can come and go: each
    quorum makes a group of its own.

    Args:
        store: where the ranks meet. A group needs keys of its own, so put a name that is new in front:
            ``PrefixStore("quorum 7", store)``.
        rank: the rank of this process in the group.
        size: the number of ranks.
        timeout: how long collectives wait; by default torch's.

    Raises RuntimeError if a rank does not come in time, and before torch 2.6.

    >>> gradwire.make_group(torch.distributed.HashStore(), rank=0, size=1).size()
    1
    """
    return gloo_group(store, rank, size, timeout or dist.default_pg_timeout)


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
