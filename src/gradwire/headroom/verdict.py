"""Judge a record: the share of communication, the possible gain, and the recipe to use."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.filesize import decimal

from gradwire.headroom.chance import gained_ms, may_be_chance
from gradwire.headroom.outer_loops import OUTER_RECIPE, OuterPrediction, predict_outer_loop
from gradwire.headroom.records import ALLREDUCE, Record, Row, ring_bytes

# A gain below 5 % is not worth a change to the training.
_WORTHWHILE_GAIN = 1.05
# Step times that differ by less count as equal.
_AS_GOOD = 0.03
# A recommended recipe has at most this relative error, and sends at least this share of plain DDP's bytes.
# Four bits have an error of 0.1, send an eighth, and train as fp32 does. One bit and low rank do not always
# (docs/fidelity.md), however close they come to the gradients of one batch.
_MAX_ERROR = 0.2
_MIN_BYTES = 0.1
# The verdict names an outer loop if a step with the best recipe takes more than four times as long as one
# without communication; or if even a coarse one more than twice, so that it waits most of the time.
_MUCH_WAITING, _MOST_WAITING = 4.0, 2.0
# Streaming in int4 and in as many fragments is what has been measured (docs/fidelity-details.md).
_OUTER_FRAGMENTS = 4
# The backward pass, in which buckets are averaged, begins after a third of a step.
_FORWARD_SHARE = 1 / 3


def recommend(record: Record) -> Row | None:
    """Return the row to use: about the fastest that keeps gradients; None to stay with torch's own."""
    best = _best(record)
    if record.world_size == 1 or best is None or _beyond_possible(record) is not None:
        return None
    # Where a step without communication gains nothing, no recipe does.
    return best if all(_is_worth_it(record, row) for row in (record.noop, best)) else None


def describe_proposal(record: Record) -> str:
    """Say what recipe ``auto`` would send, or why that is unknown; an empty text if nobody asked."""
    found, left_out = record.proposal, record.no_proposal
    if found is None:
        return left_out or ""
    chosen = ", ".join(f"{encoding} for {count}" for encoding, count in found.counts)
    plain = record.allreduce.bytes_per_step
    share = ""
    if plain and found.bytes_per_step and left_out is None:  # plain DDP's bytes are those of all models
        share = f", 1/{plain / found.bytes_per_step:.1f} of plain DDP's"
    error = "" if found.error is None else f", with an error of {found.error:.2g}"
    said = f"{found.recipe} would send {found.bytes_per_step:,} bytes a step{share}{error}"
    return " ".join(filter(None, [f"{said}: {chosen} parameters.", left_out]))


def give_verdict(record: Record) -> str:
    """Say how much communication costs, how much could be gained, and what to use."""
    if record.world_size == 1:
        return (
            "One rank has nobody to average with, so there is nothing to gain: "
            "communication starts with a second rank."
        )
    share = record.communication_share(record.allreduce)
    most = max(1.0, record.gain(record.noop))
    where = f" with {record.network}" if record.network else ""
    opening = f"{record.averaging} takes {share:.0%} of a {record.plain} step on {record.world_size} ranks"
    opening += where
    faster = _beyond_possible(record)
    if faster is not None:
        return (
            f"This measurement is too noisy to judge: {_describe(record, faster)} seems to make a step "
            f"{record.gain(faster):.2f}x as fast, but a step without any communication only "
            f"{record.gain(record.noop):.2f}x, and no recipe can gain more than that. Measure again on "
            "an idle machine, with more --steps."
        )
    if most < _WORTHWHILE_GAIN:
        return (
            f"{opening}, so no recipe could make a step more than {most:.2f}x as fast: "
            f"{record.averaging[0].lower()}{record.averaging[1:]} is not the bottleneck here, and there is "
            f"nothing to gain.{_name_remainder(record)}"
        )
    if may_be_chance(record.noop, record.allreduce):
        return (
            f"{opening}, but that may be noise: without it a step {_wins(record, record.noop)}. "
            "Nothing is shown to be gained here; more steps may tell."
        )
    opening += f"; without it a step would be {most:.2f}x as fast, which is the most any recipe could gain."
    opening += _name_remainder(record)
    best = _best(record)
    said = [opening, _judge(record, best), _judge_buckets(record, best)]
    said += [_judge_coarser(record, best), _judge_outer_loop(record, best)]
    return " ".join(filter(None, said))


def _name_remainder(record: Record) -> str:
    """Say what part of a step is communication that stays as it is, if there is any."""
    if record.remainder is None:
        return ""
    what, share = record.remainder
    return (
        f" Another {share:.0%} are {what}, which no recipe shortens; attach(..., weights='int8') sends fewer "
        "bytes in gathers."
    )


def best_of(rows: Iterable[Row], plain_bytes: int | None) -> Row | None:
    """Return the row with the smallest error among those that keep gradients and are about the fastest.

    ``plain_bytes`` are the bytes that plain DDP sends.
    """
    kept = [row for row in rows if keeps_gradients(row, plain_bytes)]
    near = [row for row in kept if row.step_ms <= (1 + _AS_GOOD) * min(r.step_ms for r in kept)]
    return min(near, key=lambda row: (_error(row), -(row.bytes_per_step or 0), row.step_ms), default=None)


def keeps_gradients(row: Row, plain_bytes: int | None) -> bool:
    """Return True if a row could be recommended, should it be fast."""
    if row.recipe == ALLREDUCE or row.decisions:  # auto keeps to a budget, which you may set
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
    gain, is_unsure = record.gain(best), may_be_chance(best, record.allreduce)
    what = f"{_describe(record, best)}, {_place(record, best)},"
    # A coarser recipe may be, and is named next.
    subject = "compression" if _fastest_coarse(record, best) is None else "it"
    if gain <= 1:
        return f"{what} makes it {gain:.2f}x as fast, so {subject} is not worth it here."
    if gain < _WORTHWHILE_GAIN:
        noise = ", which may be noise" if is_unsure else ""
        return f"{what} gains {gain - 1:.1%}{noise}, so {subject} is not worth it here."
    found = f"{what} makes it {gain:.2f}x as fast"
    if is_unsure:
        return f"{found}, but that may be noise: it {_wins(record, best)}. More steps may tell."
    cap = None if best.bucket_mb is None else f"{best.bucket_mb:g}"
    made = f"DistributedDataParallel(..., bucket_cap_mb={cap})"
    if best.recipe == ALLREDUCE:
        return f"{found}: use that, {made}."
    use = f"use it: gradwire.attach(model, {best.recipe!r})"
    if best.bucket_mb != record.bucket_mb:
        use += f", with {made}"
    return f"{found}: {use}."


def _place(record: Record, best: Row) -> str:
    """Say how the row to use compares with the others."""
    if best.step_ms == min(row.step_ms for row in record.recipes):
        return "the best measured"
    if best.step_ms == min(row.step_ms for row in record.recipes if _keeps_gradients(record, row)):
        return "the fastest that is not coarse"
    return "about as fast as any that is not coarse, with the smallest error"


def _judge_buckets(record: Record, best: Row | None) -> str:
    """Say what smaller buckets gain for plain DDP, unless that is the advice already."""
    for row in record.recipes:
        if row.recipe == ALLREDUCE and row is not best and _is_worth_it(record, row):
            what = _describe(record, row)
            return f"{what[0].upper()}{what[1:]} alone makes it {record.gain(row):.2f}x as fast."
    return ""


def _judge_coarser(record: Record, best: Row | None) -> str:
    """Name the fastest recipe that is too coarse to recommend, if it may be worth it."""
    fastest = _fastest_coarse(record, best)
    if fastest is None:
        return ""
    off = ""
    if fastest.gradient_error is not None:
        off = f" (its gradient is {fastest.gradient_error:.0%} off)"
    gain = f"{record.gain(fastest):.2f}x"
    how = f"makes it {gain} as fast" if best is None else f"is faster still, {gain}"
    said = f"{_describe(record, fastest)} {how}, but coarse{off}"
    if may_be_chance(fastest, record.allreduce):
        return f"{said}, and that may be noise: it {_wins(record, fastest)}."
    if best is not None and may_be_chance(fastest, best):
        said += f", and what it has over {_describe(record, best)} may be noise"
    said += f": check first that your model learns with it.{_name_finer(record, best, fastest)}"
    return said


def _name_finer(record: Record, best: Row | None, fastest: Row) -> str:
    """Name the coarse row with the smallest error, if it is clearly faster than the best one."""
    slower = [row for row in _coarse(record, best) if row.step_ms > (1 + _AS_GOOD) * fastest.step_ms]
    closer = [row for row in slower if (row.gradient_error or math.inf) < (fastest.gradient_error or 0.0)]
    finest = min(closer, key=_error, default=None)
    if finest is None or may_be_chance(finest, record.allreduce if best is None else best):
        return ""
    gain, off = f"{record.gain(finest):.2f}x", f"{finest.gradient_error:.0%}"
    return f" {_describe(record, finest)} is between, {gain}, and its gradient {off} off."


def _fastest_coarse(record: Record, best: Row | None) -> Row | None:
    """Return the fastest row that is too coarse to recommend; None if it gains too little over the best."""
    return min(_coarse(record, best), key=lambda row: row.step_ms, default=None)


def _coarse(record: Record, best: Row | None) -> list[Row]:
    """Return the rows that are too coarse to recommend, and gain enough over the best."""
    limit_ms = min(record.allreduce.step_ms, math.inf if best is None else best.step_ms) / _WORTHWHILE_GAIN
    return [row for row in record.recipes if not _keeps_gradients(record, row) and row.step_ms <= limit_ms]


def _judge_outer_loop(record: Record, best: Row | None) -> str:
    """Name an outer loop and what it sends, if recipes in each step wait for long."""
    found = propose_outer_loop(record)
    if found is None:
        return ""
    used = _used(record, best)
    now, then = used.step_ms / record.noop.step_ms, found.step_s / found.compute_s
    sites = "" if record.sharding is None else " A model without a mesh of two dimensions needs sites= too."
    return (
        f"With {_describe(record, used)} a step still takes {now:.1f}x as long as without communication. "
        f"Averaging parameters every few steps instead would take about {then:.1f}x and leave the network "
        "free for a fifth of the time: "
        f"{found.call()}, in {OUTER_RECIPE}, sends {decimal(found.bytes_per_step)} a step in the mean, and "
        f"{decimal(found.turn_bytes)} at once every {found.period // found.fragments} steps.{sites} See "
        "docs/local_sgd.md for what that does to the loss."
    )


def propose_outer_loop(record: Record) -> OuterPrediction | None:
    """Return the outer loop for these links, or None if a recipe in each step is enough.

    The time of an averaging is that of the measured step in the same recipe, without its forward pass; if
    that recipe was not measured, plain DDP's, in proportion to the bytes.
    """
    if record.world_size == 1 or record.sharding == "fsdp":  # there are no replicas to train apart
        return None
    if _beyond_possible(record) is not None or may_be_chance(record.noop, record.allreduce):
        return None
    used = _used(record, _best(record))
    compute_ms = record.noop.step_ms
    coarse_ms = min((r.step_ms for r in record.recipes if not _keeps_gradients(record, r)), default=0.0)
    all_wait = min(used.step_ms, coarse_ms) > _MOST_WAITING * compute_ms
    if used.step_ms <= _MUCH_WAITING * compute_ms and not all_wait:
        return None
    row = next((row for row in record.recipes if row.recipe == OUTER_RECIPE), None)
    num_bytes = None if row is None else row.bytes_per_step
    share = 1.0
    if row is None or num_bytes is None:
        row = record.allreduce
        share = record.num_parameters / 2 / record.gradient_bytes  # four bits for each value
        num_bytes = round(
            share * (row.bytes_per_step or ring_bytes(record.gradient_bytes, record.world_size))
        )
    whole_ms = share * max(row.step_ms - _FORWARD_SHARE * compute_ms, 0.0)
    fragments = min(_OUTER_FRAGMENTS, record.num_layers or _OUTER_FRAGMENTS)  # a layer is not divided
    return predict_outer_loop(whole_ms / 1e3, num_bytes, compute_ms / 1e3, fragments=fragments)


def _used(record: Record, best: Row | None) -> Row:
    """Return the row that a user would train with: the best one, or plain DDP if that is no faster."""
    return best if best is not None and record.gain(best) > 1 else record.allreduce


def _beyond_possible(record: Record) -> Row | None:
    """Return the row with the largest gain, if that is clearly more than no communication gains."""
    fastest = min(record.recipes, key=lambda row: row.step_ms, default=None)
    limit_ms = min(record.noop.step_ms, record.allreduce.step_ms) / _WORTHWHILE_GAIN
    return fastest if fastest is not None and fastest.step_ms < limit_ms else None


def _is_worth_it(record: Record, row: Row) -> bool:
    return record.gain(row) >= _WORTHWHILE_GAIN and not may_be_chance(row, record.allreduce)


def _describe(record: Record, row: Row) -> str:
    name = record.plain if row.recipe == ALLREDUCE else row.recipe
    if row.bucket_mb == record.bucket_mb:
        return name
    return f"{name} with {'default buckets' if row.bucket_mb is None else f'buckets of {row.bucket_mb:g} MB'}"


def _wins(record: Record, row: Row) -> str:
    """Say how often a row was faster than plain DDP, if chance may be the reason."""
    pairs_ms = gained_ms(row, record.allreduce)
    how = "taken side by side" if record.interleaved else "compared one by one"
    num_wins = sum(ms > 0 for ms in pairs_ms)
    return f"was faster in {num_wins} of {len(pairs_ms)} pairs {how}, which is not enough to be sure"
