"""Connections to a group's store that keep nobody waiting when its host is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from datetime import timedelta

import torch.distributed as dist

from gradwire.torch_private import Store, own_connection, store_of

STORE_IS_SILENT = (
    "The group's store does not answer, so the other ranks cannot be asked. It lives with rank 0 if "
    "init_process_group has made it: then that is the rank that died or is stopped"
)


def start_thread(work: Callable[[], None]) -> None:
    """Run ``work``, which asks a store, on a thread that never keeps Python from ending.

    A store's own timeout does not help when its host is stopped: a request then waits for ever, in a system
    call.
    """
    threading.Thread(target=work, name="gradwire-failure-store", daemon=True).start()


def begin_connection(users_store: Store, group_name: str) -> Future[Store]:
    """Begin to make a connection of its own to a group's store.

    If the host is gone, that takes longer than the store's timeout, which is five minutes.
    """
    opening: Future[Store] = Future()

    def connect() -> None:
        try:
            store = own_connection(users_store, group_name)
        except RuntimeError as error:
            opening.set_exception(error)
        else:
            opening.set_result(store)

    start_thread(connect)
    return opening


def connect(group: dist.ProcessGroup, timeout: timedelta) -> Store:
    """Return a connection of its own to a group's store; RuntimeError if it does not answer in time."""
    try:
        return begin_connection(store_of(group), group.group_name).result(timeout.total_seconds())
    except (RuntimeError, TimedOut) as error:
        raise RuntimeError(f"rank {group.rank()}: {STORE_IS_SILENT}") from error
