"""What a record says about communication, in a few sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gradwire.headroom.records import ALLREDUCE, Record, Row

# Below 5 % nobody should change how a model trains.
_WORTHWHILE_GAIN = 1.05
# Steps that differ by less are taken for equally fast.
_AS_GOOD = 0.03
# A result counts if chance gives it less than once in so many runs. Not the usual 20, as the best of a
# few recipes is looked at.
_RUNS_PER_CHANCE = 100
# More steps than these are as good as sure, and take long to count.
_MAX_PAIRS = 100
# What a gradient may be off, relatively, and the least part of plain DDP's bytes, for a recipe to be
# recommended. Four bits are 0.1 off, send an eighth, and train as fp32 does; one bit and low rank do not
# always (docs/fidelity.md), however close they come to the gradients of one batch.
_MAX_ERROR = 0.2
_MIN_BYTES = 0.1


def recommend(record: Record) -> Row | None:
    """What to use: the fastest row that keeps gradients, about; None to leave plain DDP as it is."""
    best = _best(record)
    if record.world_size == 1 or best is None:
        return None
    shown = not _may_be_chance(record, record.noop) and not _may_be_chance(record, best)
    return best if shown and record.gain(best) >= _WORTHWHILE_GAIN else None


def give_verdict(record: Record) -> str:
    """Say what share communication has, the most that could be gained, what to use and what that gains."""
    if record.world_size == 1:
        return (
            "One rank has nobody to average with, so there is nothing to gain: "
            "communication starts with a second rank."
        )
    share = record.communication_share(record.allreduce)
    most = max(1.0, record.gain(record.noop))
    where = "" if record.link is None else f" with links of {record.link}"
    opening = f"Communication takes {share:.0%} of a plain DDP step on {record.world_size} ranks{where}"
    if most < _WORTHWHILE_GAIN:
        return (
            f"{opening}, so no recipe could make a step more than {most:.2f}x as fast: "
            "communication is not the bottleneck here, and there is nothing to gain."
        )
    if _may_be_chance(record, record.noop):
        return (
            f"{opening}, but that may be noise: without it a step {_wins(record, record.noop)}. "
            "Nothing is shown to be gained here; more steps may tell."
        )
    opening += f"; without it a step would be {most:.2f}x as fast, which is the most any recipe could gain."
    best = _best(record)
    said = [opening, _judge(record, best), _judge_buckets(record, best), _judge_coarser(record, best)]
    return " ".join(filter(None, said))


def best_of(rows: Iterable[Row], plain_bytes: int | None) -> Row | None:
    """Of the rows that keep gradients and are as good as the fastest, the one that changes them least.

    ``plain_bytes`` is what plain DDP sends.
    """
    kept = [row for row in rows if keeps_gradients(row, plain_bytes)]
    near = [row for row in kept if row.step_ms <= (1 + _AS_GOOD) * min(r.step_ms for r in kept)]
    return min(near, key=lambda row: (_error(row), -(row.bytes_per_step or 0), row.step_ms), default=None)


def keeps_gradients(row: Row, plain_bytes: int | None) -> bool:
    """Whether a row could be recommended, if it is fast."""
    if row.recipe == ALLREDUCE:
        return True
    sends_enough = row.bytes_per_step is None or row.bytes_per_step >= _MIN_BYTES * (plain_bytes or 0)
    return sends_enough and (row.gradient_error or 0.0) <= _MAX_ERROR


def _best(record: Record) -> Row | None:
    return best_of(record.recipes, record.allreduce.bytes_per_step)


def _keeps_gradients(record: Record, row: Row) -> bool:
    return keeps_gradients(row, record.allreduce.bytes_per_step)


def _error(row: Row) -> float:
    return 0.0 if row.recipe == ALLREDUCE else row.gradient_error or 0.0


def _judge(record: Record, best: Row | None) -> str:
    if best is None:
        return ""
    gain = record.gain(best)
    fastest_ms = min(row.step_ms for row in record.recipes if _keeps_gradients(record, row))
    how = "the best measured" if best.step_ms == fastest_ms else "about as fast as any and the least changed"
    what = f"{_what(record, best)}, {how},"
    if gain <= 1:
        return f"{what} makes it {gain:.2f}x as fast, so compression is not worth it here."
    if gain < _WORTHWHILE_GAIN:
        return f"{what} gains {gain - 1:.1%}, so compression is not worth it here."
    found = f"{what} makes it {gain:.2f}x as fast"
    if _may_be_chance(record, best):
        return f"{found}, but that may be noise: it {_wins(record, best)}. More steps may tell."
    if best.recipe == ALLREDUCE:
        return f"{found}: use that, DistributedDataParallel(..., bucket_cap_mb={best.bucket_mb:g})."
    use = f"use it: gradwire.attach(model, {best.recipe!r})"
    if best.bucket_mb != record.bucket_mb:
        use += f", with DistributedDataParallel(..., bucket_cap_mb={best.bucket_mb:g})"
    return f"{found}: {use}."


def _judge_buckets(record: Record, best: Row | None) -> str:
    """What smaller buckets do to plain DDP, where that is worth a word and not said yet."""
    for row in record.recipes:
        if row.recipe == ALLREDUCE and row is not best and _is_worth_it(record, row):
            gain = record.gain(row)
            return f"Plain DDP with buckets of {row.bucket_mb:g} MB alone makes it {gain:.2f}x as fast."
    return ""


def _judge_coarser(record: Record, best: Row | None) -> str:
    """What is faster still, but sends something else than the gradients."""
    limit_ms = math.inf if best is None else best.step_ms / _WORTHWHILE_GAIN
    rows = [r for r in record.recipes if not _keeps_gradients(record, r) and _is_worth_it(record, r)]
    fastest = min((row for row in rows if row.step_ms <= limit_ms), key=lambda r: r.step_ms, default=None)
    if fastest is None:
        return ""
    off = ""
    if fastest.gradient_error is not None:
        off = f" (what it makes of a gradient is {fastest.gradient_error:.0%} off)"
    gain = f"{record.gain(fastest):.2f}x"
    how = f"makes it {gain} as fast" if best is None else f"is faster still, {gain}"
    return f"{_what(record, fastest)} {how}, but coarse{off}: see first that your model learns with it."


def _is_worth_it(record: Record, row: Row) -> bool:
    return record.gain(row) >= _WORTHWHILE_GAIN and not _may_be_chance(record, row)


def _what(record: Record, row: Row) -> str:
    name = "plain DDP" if row.recipe == ALLREDUCE else row.recipe
    return name if row.bucket_mb == record.bucket_mb else f"{name} with buckets of {row.bucket_mb:g} MB"


def _wins(record: Record, row: Row) -> str:
    """How often a row was faster, for one that may owe that to chance."""
    gained_ms = _gained_ms(record, row)
    how = "taken side by side" if record.interleaved else "compared one by one"
    num_wins = sum(ms > 0 for ms in gained_ms)
    return f"was faster in {num_wins} of {len(gained_ms)} pairs {how}, which is not enough to be sure"


def _gained_ms(record: Record, row: Row) -> list[float]:
    """Step by step, by how much a row was faster than plain DDP was at the same time."""
    pairs = zip(row.samples_ms, record.allreduce.samples_ms, strict=True)
    return [plain - ours for ours, plain in pairs]


def _may_be_chance(record: Record, row: Row) -> bool:
    """Whether as much is to be expected of two rows that do not differ (Wilcoxon's signed-rank test)."""
    gained_ms = sorted(_gained_ms(record, row)[:_MAX_PAIRS], key=abs)
    n = len(gained_ms)
    score = sum(rank for rank, ms in enumerate(gained_ms, start=1) if ms > 0)
    # In how many of 2**n ways to set the signs the ranks of the gains add up to each number.
    num_ways = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(num_ways) - 1, rank - 1, -1):
            num_ways[total] += num_ways[total - rank]
    return sum(num_ways[score:]) * _RUNS_PER_CHANCE > 1 << n
