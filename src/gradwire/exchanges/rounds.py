"""Rounds of sums over ranks, for one exchange or for several side by side."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from gradwire.exchanges.context import Context
from gradwire.exchanges.one_shot import sum_encoded, sum_values, take_one_round
from gradwire.exchanges.scatter import Sum
from gradwire.exchanges.two_phase import TwoPhaseReduce
from gradwire.torch_private import copy_all_

Round = tuple[Sum, ...]
"""Sums over ranks that one exchange needs before it can go on."""

Rounds = Generator[Round, None, None]
"""An exchange under way: it yields one round after another."""


def run_rounds(rounds: Iterable[Rounds], context: Context) -> None:
    """Run exchanges to their ends, side by side, so that the sums of one round share messages.

    The group, the scratch memory and the scale are those of ``context``.
    """
    running = list(rounds)
    try:
        while running:
            asked = [(each, round_) for each in running if (round_ := next(each, None)) is not None]
            running = [each for each, _ in asked]
            take_sums([each for _, round_ in asked for each in round_ if each.values.numel()], context)
    finally:
        for each in running:
            each.close()  # runs its finally blocks, which restore residuals


def side_by_side(rounds: Iterable[Rounds]) -> Rounds:
    """Advance several exchanges of one bucket together; each round has the sums of all of them."""
    running = list(rounds)
    try:
        while asked := [(each, round_) for each in running if (round_ := next(each, None)) is not None]:
            running = [each for each, _ in asked]
            yield tuple(each for _, round_ in asked for each in round_)
    finally:
        for each in running:
            each.close()


def take_sums(sums: list[Sum], context: Context) -> None:
    """Take sums: encoded ones together with those of as many rounds, exact ones with those of their dtype."""
    encoded = [each for each in sums if each.codec is not None]
    choices = take_one_round([each.used_codec for each in encoded], context.group.size)
    choices = [each.in_one_round or chosen for each, chosen in zip(encoded, choices, strict=True)]
    if in_one := [each for each, in_one_round in zip(encoded, choices, strict=True) if in_one_round]:
        sum_encoded(in_one, context)
    if in_two := [each for each, in_one_round in zip(encoded, choices, strict=True) if not in_one_round]:
        TwoPhaseReduce(in_two, context).run()
    exact: dict[torch.dtype, list[Tensor]] = {}
    for each in sums:
        if each.codec is None:
            exact.setdefault(each.values.dtype, []).append(each.values)
    for values in exact.values():
        _sum_exactly(values, context)


def _sum_exactly(parts: list[Tensor], context: Context) -> None:
    """Sum parts in one message, as one tensor: a backend with a sum of its own takes a single tensor."""
    if len(parts) == 1:
        sum_values(parts[0], context)
        return
    num_bytes = sum(part.numel() * part.element_size() for part in parts)
    together = context.scratch.bytes("together", num_bytes, parts[0].device).view(parts[0].dtype)
    places = list(together.split([part.numel() for part in parts]))
    copy_all_(places, parts)
    sum_values(together, context)
    copy_all_(parts, places)
