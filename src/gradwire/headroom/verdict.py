"""What a record says about communication, in a sentence or two."""

from __future__ import annotations

import math

from gradwire.headroom.records import ALLREDUCE, Record, Row

# Below 5 % nobody should change how a model trains.
_WORTHWHILE_GAIN = 1.05
# Steps that differ by less are taken for equally fast.
_AS_GOOD = 0.03
# A result counts if chance gives it less than once in so many runs. Not the usual 20, as the best of a
# few recipes is looked at.
_RUNS_PER_CHANCE = 100


def give_verdict(record: Record) -> str:
    """Say what share communication has, the most that could be gained, and what was."""
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
    if not record.recipes:
        return opening
    best = _best(record)
    return f"{opening} {_judge_best(record, best)}{_judge_buckets(record, best)}"


def _best(record: Record) -> Row:
    """Of the recipes that are as good as the fastest, the one that changes gradients least."""
    limit_ms = (1 + _AS_GOOD) * min(row.step_ms for row in record.recipes)
    near = [row for row in record.recipes if row.step_ms <= limit_ms]
    return min(near, key=lambda row: (row.gradient_error or 0.0, row.step_ms))


def _judge_best(record: Record, best: Row) -> str:
    gain = record.gain(best)
    found = f"{_what(record, best)}, the best measured, makes it {gain:.2f}x as fast"
    if gain <= 1:
        return f"{found}: nothing gains anything here, so compression is not worth it."
    if gain < _WORTHWHILE_GAIN:
        return f"{found}: less than {_WORTHWHILE_GAIN - 1:.0%}, so compression is not worth it here."
    if _may_be_chance(record, best):
        return f"{found}, but that may be noise: it {_wins(record, best)}. More steps may tell."
    if best.recipe == ALLREDUCE:
        return f"{found}: use that, DistributedDataParallel(..., bucket_cap_mb={best.bucket_mb:g})."
    use = f"use it: gradwire.attach(model, {best.recipe!r})"
    if best.bucket_mb != record.bucket_mb:
        use += f", with DistributedDataParallel(..., bucket_cap_mb={best.bucket_mb:g})"
    return f"{found}: {use}."


def _judge_buckets(record: Record, best: Row) -> str:
    """What smaller buckets do to plain DDP, where that is worth a word and not said yet."""
    others = [row for row in record.recipes if row.recipe == ALLREDUCE and row is not best]
    worth = [
        row for row in others if record.gain(row) >= _WORTHWHILE_GAIN and not _may_be_chance(record, row)
    ]
    if not worth:
        return ""
    row = worth[0]
    return f" Plain DDP with buckets of {row.bucket_mb:g} MB alone makes it {record.gain(row):.2f}x as fast."


def _what(record: Record, row: Row) -> str:
    name = "plain DDP" if row.recipe == ALLREDUCE else row.recipe
    return name if row.bucket_mb == record.bucket_mb else f"{name} with buckets of {row.bucket_mb:g} MB"


def _num_wins(record: Record, row: Row) -> int:
    """In how many steps a row was faster than plain DDP was at the same time."""
    pairs = zip(row.samples_ms, record.allreduce.samples_ms, strict=True)
    return sum(ours < plain for ours, plain in pairs)


def _wins(record: Record, row: Row) -> str:
    """How often a row was faster, for one that may owe that to chance."""
    num_wins, num_pairs = _num_wins(record, row), len(row.samples_ms)
    return f"was faster in {num_wins} of {num_pairs} taken side by side, too few to be sure"


def _may_be_chance(record: Record, row: Row) -> bool:
    """Whether so many wins or more are to be expected of two rows that do not differ (a sign test)."""
    num_pairs, num_wins = len(row.samples_ms), _num_wins(record, row)
    num_ways = sum(math.comb(num_pairs, wins) for wins in range(num_wins, num_pairs + 1))
    return num_ways * _RUNS_PER_CHANCE > 1 << num_pairs
