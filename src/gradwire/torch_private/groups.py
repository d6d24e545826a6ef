"""Private names of process groups and of the stores in which their ranks meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

_C10D = "torch._C._distributed_c10d"
# Rows of `PRIVATE_NAMES`. Classes are in torch.distributed too, but not for type checkers.
GROUP_NAMES = (
    (f"{_C10D}:Store", "where ranks meet", "torch.distributed.Store"),
    (f"{_C10D}:HashStore", "where a group of one rank meets", "torch.distributed.HashStore"),
    (f"{_C10D}:PrefixStore", "where ranks meet", "torch.distributed.PrefixStore"),
    (f"{_C10D}:TCPStore", "where ranks meet", "torch.distributed.TCPStore"),
    (f"{_C10D}:ProcessGroupGloo", "groups that torch's registry does not know", "dist.new_group"),
    *(
        (path, "a group over any store", "refuse gradwire.make_group")
        for path in (
            "group:_register_backend",
            "group:_set_default_backend",
            f"{_C10D}:ProcessGroupGloo._set_sequence_number_for_group",
        )
    ),
    ("group:_get_backend", "the backend for a device", "dist.get_backend_config"),
    ("group:_device_types", "the devices that a group serves", "dist.get_backend_config"),
    ("options:_timeout", "the timeout of a group", "dist.default_pg_timeout"),
    (
        "torch.distributed.distributed_c10d:_get_process_group_store",
        "the store of a group in older versions",
        "ProcessGroup.get_group_store, which newer versions have",
    ),
    ("torch.distributed.distributed_c10d:_get_default_store", "the world's store", "store_of(WORLD)"),
    (
        f"{_C10D}:PrefixStore._underlying_non_prefix_store",
        "knows a TCPStore behind prefixes",
        "PrefixStore.underlying_store, until there is no prefix",
    ),
)


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store in which the ranks of ``group`` meet."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def default_store() -> Any:
    """Return the store of the world."""
    return dist.distributed_c10d._get_default_store()


def has_tcp_store(store: Any) -> bool:
    """Return True if ``store`` is a TCPStore, whatever prefixes are around it."""
    return isinstance(_without_prefixes(store), TCPStore)


def _without_prefixes(store: Any) -> Any:
    return getattr(store, "_underlying_non_prefix_store", store)  # only a PrefixStore has one


def own_connection(store: Any, group_name: str) -> Any:
    """Return a group's ``store`` with a connection of its own, if it has connections.

    torch 2.6 cannot clone a store, 2.8 can. Without that, the keys of this one are apart from the group's.
    """
    if hasattr(store, "clone"):
        return store.clone()
    if not has_tcp_store(store):
        return store
    server = _without_prefixes(store)
    connected = TCPStore(server.host, server.port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"gradwire/{group_name}", connected)


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a Gloo group over ``store``, which torch's registry does not know; collective.

    Raises TypeError or ValueError for what torch crashes on, or refuses in words of its own.
    """
    if not hasattr(dist.ProcessGroup, "_set_default_backend"):  # before torch 2.6
        raise RuntimeError(
            f"torch {torch.__version__} cannot make a process group over a store: update torch, or use "
            "torch.distributed.new_group"
        )
    if not isinstance(store, Store):
        raise TypeError(f"store is a torch.distributed.Store, such as a TCPStore, not {type(store).__name__}")
    for name, value in (("rank", rank), ("size", size)):
        if not isinstance(value, SupportsIndex):
            raise TypeError(f"{name} is a whole number, not {value!r}")
    if not 0 <= rank < size:
        raise ValueError(f"a group of {size} ranks has ranks from 0 to {size - 1}, and no rank {rank}")
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is a datetime.timedelta, not {timeout!r}")
    backend = ProcessGroupGloo(store, rank, size, timeout)
    backend._set_sequence_number_for_group()
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    return group


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the devices whose tensors ``group`` can exchange."""
    return list(group._device_types)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that serves tensors on ``device``."""
    return group._get_backend(device)


def timeout_of_backend(backend: Any) -> timedelta | None:
    """Return the timeout of a backend's collectives, or None if it has none."""
    found = getattr(backend.options, "_timeout", None)
    return None if found is None else timedelta(seconds=found.total_seconds())
