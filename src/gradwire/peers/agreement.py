"""Comparison of claims: ranks state what they are about to do, and go on only if all state the same."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.errors import encodable
from gradwire.peers.groups import Group, gather
from gradwire.peers.process_groups import world_ranks
from gradwire.peers.rendezvous import WaitLog, claim_key, missing_ranks_error
from gradwire.peers.store_connections import LimitedStore, StoreIsSilent, limited_store

Claim = Mapping[str, str]
"""The fields that must be the same on all ranks before they go on, and this rank's values."""


class SealedClaim:
    """A claim with its digest, for one that is compared often."""

    def __init__(self, claim: Claim) -> None:
        self.fields = json.dumps(claim).encode()
        self.digest = _digest(claim)


_ERROR = "error: "
_NUM_SHOWN = 3
_HEADER = struct.Struct("<8sQd")
"""The digest of a claim, the length of its fields, and a number."""


class PeerValueError(ValueError, RuntimeError):
    """The error of a rank whose peer has raised ValueError."""


class PeerTypeError(TypeError, RuntimeError):
    """The error of a rank whose peer has raised TypeError."""


_PEER_ERRORS = {"ValueError": PeerValueError, "TypeError": PeerTypeError}


def agree(
    group: dist.ProcessGroup,
    rendezvous: str,
    claim: Claim | Exception,
    timeout: timedelta,
    caller: str,
    note: str = "",
) -> list[str]:
    """Wait for every rank's claim; raise on all ranks unless all claims are the same.

    Args:
        group: the ranks that take part.
        rendezvous: a name from `join_rendezvous` or `next_rendezvous`, used for one agreement.
        claim: this rank's claim, or the exception that keeps it from going on; the other ranks then raise
            with its text.
        timeout: the longest wait for all claims together.
        caller: the function that errors name.
        note: a text to pass to all ranks; it may differ between them.

    Returns every rank's note, in rank order. Raises RuntimeError if a rank makes no claim in time or has
    failed, and ValueError if claims differ. After a peer's ValueError or TypeError, the error is also one.
    """
    store, rank, names = limited_store(group, timeout), group.rank(), world_ranks(group)
    keys = [claim_key(rendezvous, peer) for peer in range(group.size())]
    if isinstance(claim, Exception):
        kind = next((k.__name__ for k in (ValueError, TypeError) if isinstance(claim, k)), "RuntimeError")
        answer = encodable(f"{_ERROR}{kind}: {claim}")  # a store takes valid UTF-8 only
    else:
        # Everyone reads the digest. The fields are read only if digests differ: they can be long.
        store.set(f"{keys[rank]}/fields", json.dumps(claim))
        answer = f"{_digest(claim).hex()} {note}"
    store.set(keys[rank], answer)
    if missing := _wait_for_keys(store, keys, timeout, WaitLog(group, timeout, caller)):
        raise missing_ranks_error(group, rendezvous, missing, timeout, caller)
    answers = [answer.decode() for answer in store.multi_get(keys)]
    failed = [peer for peer, answer in enumerate(answers) if answer.startswith(_ERROR)]
    if failed and rank not in failed:
        kind, _, text = answers[failed[0]].removeprefix(_ERROR).partition(": ")
        raise _PEER_ERRORS.get(kind, RuntimeError)(
            f"rank {names[rank]}: {caller} failed on rank {names[failed[0]]}: {text}"
        )
    digests, _, notes = zip(*(answer.partition(" ") for answer in answers), strict=True)
    if not failed and len(set(digests)) > 1:
        claims = list(map(json.loads, store.multi_get([f"{key}/fields" for key in keys])))
        difference = describe_differences(claims, names)
        raise ValueError(f"rank {names[rank]}: ranks call {caller} with different things: {difference}")
    return list(notes)


def require_same(claim: Claim | SealedClaim, group: Group, device: torch.device) -> None:
    """Compare claims by messages over ``group``; exchange the fields only if their digests differ.

    Raises ValueError on every rank, with the same text. On CUDA, waits for the device.
    """
    own = claim if isinstance(claim, SealedClaim) else SealedClaim(claim)
    gather_if_same(own, 0.0, group, device)


def gather_if_same(own: SealedClaim, number: float, group: Group, device: torch.device) -> list[float]:
    """Compare claims as `require_same` does, and return every rank's ``number``, in rank order."""
    if group.size == 1:
        return [number]
    header = _HEADER.pack(own.digest, len(own.fields), number)
    rows = _gather_bytes(header, [len(header)] * group.size, group, device)
    digests, lengths, numbers = zip(*(_HEADER.unpack(row) for row in rows), strict=True)
    if len(set(digests)) > 1:
        claims = [json.loads(row) for row in _gather_bytes(own.fields, lengths, group, device)]
        raise ValueError(f"ranks do not agree: {describe_differences(claims, group.names)}")
    return list(numbers)


def describe_differences(claims: Sequence[Claim], names: Sequence[int] | None = None) -> str:
    """Name the fields that differ, each with its values and the ranks that have them.

    ``claims`` is in rank order, and ``names`` has the ranks that the text names, by default 0 and on.

    >>> describe_differences([{"gradwire": "0.1"}, {"gradwire": "0.2"}, {"gradwire": "0.1"}], [4, 5, 6])
    'gradwire is 0.2 on rank(s) 5, 0.1 on rank(s) 4, 6'
    """
    names = range(len(claims)) if names is None else names
    shown: dict[str, str] = {}
    for field in dict.fromkeys(field for claim in claims for field in claim):
        values = [claim.get(field, "absent") for claim in claims]
        # If "recipe.exchange" differs, its parts "recipe.exchange.*" differ too and add nothing.
        if len(set(values)) > 1 and not any(field.startswith(f"{other}.") for other in shown):
            by_value: dict[str, list[int]] = {}
            for name, value in zip(names, values, strict=True):
                by_value.setdefault(value, []).append(name)
            sides = sorted(by_value.items(), key=lambda side: len(side[1]))
            shown[field] = ", ".join(f"{value} on rank(s) {_list(ranks)}" for value, ranks in sides)
    more = f"; and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
    return "; ".join(f"{field} is {text}" for field, text in list(shown.items())[:_NUM_SHOWN]) + more


def _wait_for_keys(store: LimitedStore, keys: Sequence[str], timeout: timedelta, slow: WaitLog) -> list[int]:
    """Wait until all keys are set or the time is up; return the indices of those that are not set."""
    deadline = time.monotonic() + timeout.total_seconds()

    def missing() -> list[int]:
        return [index for index, key in enumerate(keys) if not store.check([key])]

    # All at once: with one request for each key, a thousand ranks would send a million.
    while not _are_set(store, keys, min(deadline - time.monotonic(), slow.left_s)):
        slow.tell(missing)
        if time.monotonic() >= deadline:
            return missing()
    return []


def _are_set(store: LimitedStore, keys: Sequence[str], wait_s: float) -> bool:
    """Wait for keys; return False if they are not set in time."""
    try:
        store.wait(keys, timedelta(seconds=max(wait_s, 0.001)))
    except StoreIsSilent:
        raise
    except RuntimeError:
        return False
    return True


def _gather_bytes(own: bytes, lengths: Sequence[int], group: Group, device: torch.device) -> list[bytearray]:
    """Return every rank's bytes, in rank order; ``lengths`` is the length of each."""
    rows = [torch.zeros(length, dtype=torch.uint8, device=device) for length in lengths]
    rows[group.rank].copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    gather(rows, group)
    return [bytearray(row.tolist()) for row in rows]


def _digest(claim: Claim) -> bytes:
    return hashlib.blake2b(json.dumps(claim).encode(), digest_size=8).digest()


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
