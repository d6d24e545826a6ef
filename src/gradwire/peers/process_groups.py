"""Process groups: facts about one of torch's, bytes that its ranks gather, and groups over any store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.torch_private import Store, backend_of, device_types, gloo_group, timeout_of_backend

# torch 2.13 has renamed them.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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

    >>> import gradwire
    >>> from torch.distributed import HashStore
    >>> gradwire.make_group(HashStore(), rank=0, size=1).size()
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


def timeout_or_own(timeout: object, group: dist.ProcessGroup) -> timedelta:
    """Return the user's timeout, or the group's own if there is none that `require_timeout` accepts.

    Ranks meet within it first, so that an invalid one is told to all of them.
    """
    return timeout if isinstance(timeout, timedelta) and timeout > timedelta(0) else timeout_of(group)


def require_timeout(timeout: object) -> None:
    """Raise TypeError or ValueError if the user's timeout is neither None nor a positive ``timedelta``."""
    if not isinstance(timeout, timedelta | None):
        raise TypeError(f"timeout must be a datetime.timedelta, not {timeout!r}")
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"timeout must be more than 0 seconds, not {timeout.total_seconds():g}")


def world_ranks(group: dist.ProcessGroup) -> Sequence[int]:
    """Return the ranks by which errors name the members of ``group``: those of the world.

    The members of a group that torch does not know, such as one of `make_group`, have no others than its own.
    """
    return _torch_ranks(group) or range(group.size())


def is_in_world(group: dist.ProcessGroup) -> bool:
    """Return True if the members of ``group`` are ranks of torch's world, False for one of `make_group`."""
    return _torch_ranks(group) is not None


def _torch_ranks(group: dist.ProcessGroup) -> list[int] | None:
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return None


def own_world_rank(group: dist.ProcessGroup) -> int:
    """Return the rank by which errors name this member of ``group``."""
    return world_ranks(group)[group.rank()]


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
    row[: len(own)] = bytes_tensor(own)
    rows = _all_gather(row.to(device), group)
    return [row[: int(size)].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def bytes_tensor(data: bytes) -> Tensor:
    """Return a copy of bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# Note [Groups by position]
# When a collective fails, torch looks up the group that was given as ``group=``, to log it. It does not find
# one of `make_group`, and raises ValueError in place of the error. So such groups are given by position.
def _all_gather(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group)
    return everyone
