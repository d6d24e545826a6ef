"""Latency and bandwidth between pairs of ranks, one pair at a time."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.doctor.findings import Finding

_NUM_PINGS = 20
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 26
_TARGET_S = 0.1
_NUM_REPEATS = 3
# Up to this many ranks, all pairs are measured; above it, each rank with two others.
_ALL_PAIRS = 8
_ODD_ONE_OUT = 3.0


@dataclass(frozen=True)
class Link:
    """Figures of one pair of ranks, both directions together."""

    ranks: tuple[int, int]
    latency_ms: float
    """Half of the quickest round trip."""
    mbit_per_s: float

    def __str__(self) -> str:
        first, second = self.ranks
        return f"{first} - {second}: {self.latency_ms:.3f} ms, {self.mbit_per_s:,.0f} Mbit/s"


def pairs_to_measure(size: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure: all of a small group, and two rings through a large one.

    >>> pairs_to_measure(3)
    [(0, 1), (0, 2), (1, 2)]
    >>> len(pairs_to_measure(64))
    96
    """
    if size <= _ALL_PAIRS:
        return [(low, high) for low in range(size) for high in range(low + 1, size)]
    steps = (1, size // 2)
    pairs = {tuple(sorted((rank, (rank + step) % size))) for step in steps for rank in range(size)}
    return sorted((low, high) for low, high in pairs)


def measure_links(device: torch.device) -> list[Link]:
    """Return the figures of pairs of ranks, over the default group; collective.

    Every rank returns the same links. A link's figures are the slower rank's.
    """
    rank, pairs = dist.get_rank(), pairs_to_measure(dist.get_world_size())
    figures = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
    for index, pair in enumerate(pairs):
        dist.barrier()
        if rank in pair:
            latency_s, bits_per_s = _measure(pair[rank == pair[0]], rank == pair[0], device)
            figures[index] = torch.tensor([latency_s * 1e3, -bits_per_s / 1e6])
        else:
            figures[index] = float("-inf")
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return [Link(pair, ms, -mbit) for pair, (ms, mbit) in zip(pairs, figures.tolist(), strict=True)]


def _measure(peer: int, is_first: bool, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a message one way, and the bits per second of large ones."""
    latency_s = min(_round_trip(torch.zeros(1, device=device), peer, is_first) for _ in range(_NUM_PINGS)) / 2
    num_bytes = _FIRST_BYTES
    while True:
        row = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        _round_trip(row, peer, is_first)
        seconds = statistics.median(_round_trip(row, peer, is_first) for _ in range(_NUM_REPEATS))
        # The first rank's clock decides for both.
        wants_more = torch.tensor(seconds < _TARGET_S and num_bytes < _MOST_BYTES, device=device).float()
        if is_first:
            dist.send(wants_more, peer)
        else:
            dist.recv(wants_more, peer)
        if not wants_more.item():
            return latency_s, 2 * 8 * num_bytes / seconds
        num_bytes *= 4


def _round_trip(row: Tensor, peer: int, is_first: bool) -> float:
    """Send a row to ``peer`` and back, and return the seconds."""
    begin = time.perf_counter()
    for is_mine in (is_first, not is_first):
        if is_mine:
            dist.send(row, peer)
        else:
            dist.recv(row, peer)
    if row.is_cuda:
        torch.cuda.synchronize(row.device)
    return time.perf_counter() - begin


def compare_links(links: list[Link]) -> list[Finding]:
    """Return a finding for all links, and one for each that is far slower than the others."""
    if not links:
        return [Finding("links", "note", "one rank alone has no links")]
    rate = statistics.median(link.mbit_per_s for link in links)
    latency = statistics.median(link.latency_ms for link in links)
    typical = f"{latency:.3f} ms and {rate:,.0f} Mbit/s between two ranks"
    findings = [Finding("links", "ok", f"{typical}, the median of {len(links)} pair(s)")]
    for link in links:
        is_slow = link.mbit_per_s < rate / _ODD_ONE_OUT
        if is_slow or link.latency_ms > max(_ODD_ONE_OUT * latency, latency + 1.0):
            advice = (
                "look at the machines of these ranks: cable, switch port, another job. Every step waits for "
                "the slowest link"
            )
            findings.append(Finding("links", "problem", f"ranks {link}; others have {typical}", advice))
    return findings
