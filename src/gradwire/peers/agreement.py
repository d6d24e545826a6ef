"""Ranks say what they are about to do, field by field, and go on only if all say the same."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.peers.groups import Group, gather
from gradwire.peers.rendezvous import claim_key, give_up

Claim = Mapping[str, str]
"""What a rank is about to do: the value of each field that must be the same on all ranks."""

_NUM_TOLD = 3


def agree(
    group: dist.ProcessGroup,
    meeting: str,
    claim: Claim | Exception,
    timeout: timedelta,
    caller: str = "gradwire.attach",
    own: str = "",
) -> list[str]:
    """Wait for every rank's claim; raise on all ranks unless all claims are the same.

    Returns what each rank says of its own, which may differ. An exception for a claim says that this rank
    cannot go on; the others then learn why. Raises RuntimeError when a rank does not come in time,
    ValueError when claims differ.
    """
    store, rank, size = group.get_group_store(), group.rank(), group.size()
    keys = [claim_key(meeting, peer) for peer in range(size)]
    if isinstance(claim, Exception):
        # A store takes no text with half a character in it, as names of files may have.
        said = f"error: {claim}".encode(errors="backslashreplace").decode()
    else:
        # A digest for everyone, and the fields for those who need to know: a model has many parameters.
        store.set(f"{keys[rank]}/fields", json.dumps(claim))
        said = f"{_digest(claim).hex()} {own}"
    store.set(keys[rank], said)
    deadline = time.monotonic() + timeout.total_seconds()
    missing = []
    for peer, key in enumerate(keys):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([key], timedelta(seconds=left))
        except RuntimeError:
            missing.append(peer)
    if missing:
        raise give_up(group, meeting, missing, timeout, caller)
    answers = [store.get(key).decode() for key in keys]
    failed = [peer for peer in range(size) if answers[peer].startswith("error: ")]
    if failed and rank not in failed:
        text = answers[failed[0]].removeprefix("error: ")
        raise RuntimeError(f"rank {rank}: {caller} failed on rank {failed[0]}: {text}")
    digests, _, owns = zip(*(answer.partition(" ") for answer in answers), strict=True)
    if not failed and len(set(digests)) > 1:
        claims = [json.loads(store.get(f"{key}/fields")) for key in keys]
        raise ValueError(f"rank {rank}: ranks call {caller} with different things: {differences(claims)}")
    return list(owns)


def require_same(claim: Claim, group: Group, device: torch.device) -> None:
    """Compare claims over a lane's group: a digest, and what differs only if that does.

    Raises ValueError on every rank, with the same text. On CUDA it waits for the device.
    """
    if group.size == 1:
        return
    text = json.dumps(claim).encode()
    own = _digest(claim) + len(text).to_bytes(8, "little")
    answers = [bytes(row) for row in _gather_bytes(own, [len(own)] * group.size, group, device)]
    if len(set(answers)) == 1:
        return
    lengths = [int.from_bytes(answer[-8:], "little") for answer in answers]
    claims = [json.loads(row) for row in _gather_bytes(text, lengths, group, device)]
    raise ValueError(f"ranks do not agree: {differences(claims)}")


def differences(claims: Sequence[Claim]) -> str:
    """Which fields differ, and who says what; ``claims`` is by rank.

    >>> differences([{"gradwire": "0.1"}, {"gradwire": "0.2"}, {"gradwire": "0.1"}])
    'gradwire is 0.2 on rank(s) 1, 0.1 on rank(s) 0, 2'
    """
    told: dict[str, str] = {}
    for field in dict.fromkeys(field for claim in claims for field in claim):
        values = [claim.get(field, "absent") for claim in claims]
        # Of an exchange that differs in kind, the parts differ too.
        if len(set(values)) > 1 and not any(field.startswith(f"{other}.") for other in told):
            by_value = {v: [rank for rank, each in enumerate(values) if each == v] for v in values}
            sides = sorted(by_value.items(), key=lambda side: len(side[1]))
            told[field] = ", ".join(f"{value} on rank(s) {_list(ranks)}" for value, ranks in sides)
    more = f"; and {len(told) - _NUM_TOLD} more" if len(told) > _NUM_TOLD else ""
    return "; ".join(f"{field} is {text}" for field, text in list(told.items())[:_NUM_TOLD]) + more


def _gather_bytes(own: bytes, lengths: Sequence[int], group: Group, device: torch.device) -> list[bytearray]:
    rows = [torch.zeros(length, dtype=torch.uint8, device=device) for length in lengths]
    rows[group.rank].copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    gather(rows, group)
    return [bytearray(row.tolist()) for row in rows]


def _digest(claim: Claim) -> bytes:
    return hashlib.blake2b(json.dumps(claim).encode(), digest_size=8).digest()


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
