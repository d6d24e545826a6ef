"""Ranks meet, say what they are about to do, and go on only if all say the same."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist


def next_meeting(group: dist.ProcessGroup) -> str:
    """A name that is new to the group, and the same on each rank if all ask equally often.

    Counted in the store, so that it is new also to a group that was destroyed and made again there.
    """
    number = group.get_group_store().add(f"gradwire/meetings/{group.rank()}", 1)
    return f"gradwire/{number}"


def agree(
    group: dist.ProcessGroup, meeting: str, claim: str, timeout: timedelta, caller: str = "gradwire.attach"
) -> None:
    """Wait for every rank's claim; raise on all ranks unless all claims are the same.

    A claim that starts with ``"error: "`` says that this rank cannot go on; the others then learn why.
    Raises RuntimeError when a rank does not come in time, ValueError when claims differ.
    """
    store, rank, size = group.get_group_store(), group.rank(), group.size()
    keys = [f"{meeting}/claim/{peer}" for peer in range(size)]
    store.set(keys[rank], claim)
    deadline = time.monotonic() + timeout.total_seconds()
    missing = []
    for peer, key in enumerate(keys):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([key], timedelta(seconds=left))
        except RuntimeError:
            missing.append(peer)
    if missing:
        # A rank that comes later must not go on alone.
        store.set(keys[rank], f"error: it gave up waiting for rank(s) {_list(missing)}")
        raise RuntimeError(
            f"rank {rank}: {caller} is collective, but rank(s) {_list(missing)} of {size} did not "
            f"call it within {timeout.total_seconds():g} s; every rank of the model's process group must"
        )
    claims = [store.get(key).decode() for key in keys]
    failed = [peer for peer in range(size) if claims[peer].startswith("error: ")]
    if failed and rank not in failed:
        text = claims[failed[0]].removeprefix("error: ")
        raise RuntimeError(f"rank {rank}: {caller} failed on rank {failed[0]}: {text}")
    if not failed and len(set(claims)) > 1:
        said = "; ".join(
            f"rank(s) {_list([p for p in range(size) if claims[p] == text])}: {text}"
            for text in dict.fromkeys(claims)
        )
        raise ValueError(f"rank {rank}: ranks call {caller} with different things. {said}")


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
