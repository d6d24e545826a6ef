"""Chance: steps of two rows in pairs, and a test of which row is faster."""

from __future__ import annotations

from gradwire.headroom.records import Row

# A result counts if chance gives it less than once in this many runs. The usual 20 would be too few,
# because the best of several recipes is judged.
_RUNS_PER_CHANCE = 100
# So many pairs leave no doubt, and more would take long to count.
_MAX_PAIRS = 100


def gained_ms(row: Row, other: Row) -> list[float]:
    """Return, for each step, by how much a row was faster than another."""
    return [theirs - ours for ours, theirs in zip(row.samples_ms, other.samples_ms, strict=True)]


def may_be_chance(row: Row, other: Row) -> bool:
    """Return True if a row may be no faster than another (Wilcoxon's signed-rank test, one-sided)."""
    pairs_ms = sorted(gained_ms(row, other)[:_MAX_PAIRS], key=abs)
    n = len(pairs_ms)
    score = sum(rank for rank, ms in enumerate(pairs_ms, start=1) if ms > 0)
    # num_ways[s]: the number of sign patterns, of 2**n, whose positive ranks sum to s (Wilcoxon).
    num_ways = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(num_ways) - 1, rank - 1, -1):
            num_ways[total] += num_ways[total - rank]
    return sum(num_ways[score:]) * _RUNS_PER_CHANCE > 1 << n
