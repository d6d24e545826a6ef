"""The tuner of recipe ``auto`` on the way of a model's buckets, and what it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gradwire.averaging import Bucket, Engine
from gradwire.errors import Place
from gradwire.recipes import Tuning
from gradwire.tuning import Decision, PolicyState, Tuner


class Tuned:
    """Lets a tuner see each bucket and each step, and gives the engine the exchange that it decides on."""

    def __init__(
        self,
        tuning: Tuning,
        engine: Engine,
        rank: int,
        world_size: int,
        may_look: Callable[[], bool],
        on_decision: Callable[[Decision], None],
    ) -> None:
        """Tune ``engine``; call ``on_decision`` after each decision.

        If ``may_look`` returns False, which it does on all ranks or none, a step has no collective work.
        """
        self.tuner = Tuner(tuning, rank, world_size)
        self._tuning = tuning
        self._engine = engine
        self._may_look = may_look
        self._on_decision = on_decision
        self._is_due = False

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.tuner.decisions

    def arrive(self, bucket: Bucket, place: Place) -> None:
        """See a bucket that is not averaged yet."""
        self.tuner.arrive(bucket.layout, bucket.flat, place.step, is_last=bucket.is_last)

    def end_backward(self, place: Place, device: torch.device) -> None:
        """Note that a backward pass has ended."""
        self._is_due = self.tuner.end_step(place.step, device) and self._may_look()

    def decide(self, place: Place, device: torch.device) -> None:
        """Decide with the other ranks, if this step is due; collective. The caller raises failures."""
        if not self._is_due or self._engine.failure is not None:
            return
        self._is_due = False
        self._engine.run_collective(self.tuner.work, place, device)
        if self._engine.failure is None and (decision := self.tuner.conclude(device)) is not None:
            self._use(dict(decision.encodings))
            self._on_decision(decision)

    def load(self, state: PolicyState | None, step: int, *, look_soon: bool) -> None:
        """Go on from the state of another run, at ``step``."""
        self.tuner.load(state, step, look_soon=look_soon)
        choice = self.tuner.policy.state.choice
        self._use({} if choice is None else dict(choice.encodings))

    def _use(self, encodings: dict[str, str]) -> None:
        self._engine.recipe = replace(self._engine.recipe, exchange=self._tuning.exchange(encodings))
