"""Rows that take turns on all ranks: their order, the times of the slowest rank, and ratios of these."""

import random
import statistics
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def shuffled(rows: dict[str, T], turn: int) -> list[tuple[str, T]]:
    """Return the rows in another order for each turn, the same on every rank."""
    return random.Random(turn).sample(list(rows.items()), len(rows))


def slowest(seconds: list[float], per_turn: int = 1) -> list[float]:
    """Return the times from the end of one step to the end of the next, on the slowest rank, in milliseconds.

    The ``per_turn`` steps of a turn follow each other. Of two ranks that are far apart, each may be the slow
    one in every other step.
    """
    ends = torch.tensor(seconds, dtype=torch.float64).view(-1, per_turn).cumsum(1)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    times: list[float] = (1e3 * ends.diff(prepend=torch.zeros(len(ends), 1))).flatten().tolist()
    return times


def ratio(values: list[float], base: list[float], per_round: int = 1) -> float:
    """Return the median over rounds of how many times longer `values` are than `base`."""
    rounds = zip(
        *(
            [statistics.mean(v[i : i + per_round]) for i in range(0, len(v), per_round)]
            for v in (values, base)
        ),
        strict=True,
    )
    return float(statistics.median(a / b for a, b in rounds))
