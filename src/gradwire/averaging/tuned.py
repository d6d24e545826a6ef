"""The link between an engine and the tuner of recipe ``auto``: it shows buckets and sets the exchange."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.averaging.checkpoint import Saved
from gradwire.averaging.engine import Engine
from gradwire.averaging.native import NativeMean
from gradwire.buckets import BucketLayout
from gradwire.errors import Place
from gradwire.recipes import Tuning
from gradwire.tuning import (
    Decision,
    PolicyState,
    StepReport,
    Tuner,
    combine_reports,
    decision_table,
    read_state,
)

Share = Callable[[StepReport | None], list[StepReport | None]]
"""Gives a report to other ranks, and returns all of theirs; None stands for a failure."""


class Tuned:
    """Lets a tuner see each bucket and each step, and gives the engine the exchange that it decides on."""

    def __init__(
        self,
        tuning: Tuning,
        engine: Engine,
        rank: int,
        world_size: int,
        step: int,
        may_look: Callable[[], bool] = lambda: True,
        on_decision: Callable[[Decision], None] = lambda decision: None,
        share: Share = lambda report: [report],
        native: NativeMean | None = None,
    ) -> None:
        """Tune ``engine`` from ``step`` on; call ``on_decision`` after each decision.

        If ``may_look`` returns False, which it does on all ranks or none, a step has no collective work.
        ``share`` gives reports to ranks that average other parts of the parameters, and returns theirs.
        ``native`` averages exact gradients, if it is given.
        """
        self.tuner = Tuner(tuning, rank, world_size)
        self._engine = engine
        self._may_look = may_look
        self._on_decision = on_decision
        self._share = share
        self._native = native
        self._report: Future[Tensor] | None = None
        """Completes when the measurements of all ranks are exchanged; None if none are under way."""
        engine.observer = self._see
        self.load(None, step, look_soon=False)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.tuner.decisions

    @property
    def error(self) -> float | None:
        """The relative error that the budget bounds, with the present encodings; None if it is not known."""
        return self.tuner.error

    def blocked(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which the backward pass waits for a bucket."""
        return self.tuner.timer.blocked(device)

    def count_until_done(self, future: Future[Tensor]) -> None:
        """Count the time until a bucket on CPU is complete as one in which the backward pass may wait."""
        self.tuner.timer.count_until_done(future)

    def end_arrivals(self, num_buckets: int, device: torch.device) -> None:
        """Note that all buckets of a step have arrived; needed if none of them was called the last."""
        self.tuner.end_arrivals(num_buckets, device)

    def end_step(self, place: Place, device: torch.device) -> None:
        """Note that all buckets of a step are averaged."""
        self.tuner.end_step(place.step, device)

    def start_report(self, place: Place, device: torch.device) -> None:
        """Exchange measurements with the other ranks, if a report is due; collective. Does not wait."""
        if self.tuner.is_due and self._engine.failure is None and self._may_look():
            self._report = self._engine.start_collective(self.tuner.work, place, device)

    def decide(self, device: torch.device) -> None:
        """Decide from the report that was started, if there is one. The caller raises failures.

        Every rank calls it before its next bucket.
        """
        if self._report is None:
            return
        with self.tuner.count():
            self._wait_for_report()
            reports = self._share(None if self._engine.failure is not None else self.tuner.report)
            known = [report for report in reports if report is not None]
            if len(known) < len(reports):  # some ranks have failed, and tell the others
                return
            decision = self.tuner.conclude(combine_reports(known), device)
            self._use_choice()
        if decision is not None:
            self._on_decision(decision)

    def save(self) -> str:
        """Return the tuner's part of a state."""
        return self.tuner.save()

    def read(self, saved: Saved) -> PolicyState | None:
        """Return the tuner's part of a saved state; ValueError if it cannot be read."""
        return read_state(saved.tuning) if saved.tuning else None

    def load(self, state: PolicyState | None, step: int, *, look_soon: bool) -> None:
        """Go on at ``step`` from the state that `read` has returned; after a change of ranks, look soon."""
        self._wait_for_report()
        self.tuner.load(state, step, look_soon=look_soon)
        self._use_choice()

    def __str__(self) -> str:
        """A table of the decisions, and what they have cost."""
        cost = f"measuring and deciding took {self.tuner.looking:.1%} of the time"
        table = decision_table([each.summary for each in self.decisions])
        return f"{table}\n{cost}" if self.decisions else cost

    def _wait_for_report(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            report.wait()

    def _see(
        self, layout: BucketLayout, flat: Tensor, place: Place, is_last: bool, weight: float | None
    ) -> None:
        self.tuner.arrive(layout, flat, place.step, is_last=is_last, weight=weight)

    def _use_choice(self) -> None:
        exchange = self.tuner.exchange
        if exchange != self._engine.recipe.exchange:
            self._engine.recipe = replace(self._engine.recipe, exchange=exchange)
        is_exact = set(self.tuner.encodings.values()) == {"fp32"}
        self._engine.native = self._native if is_exact else None
