"""The tuner of a wire: it takes samples and times, exchanges them, and asks the policy."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.exchanges import Exchange
from gradwire.peers import Group, gather_rows
from gradwire.recipes import Tuning
from gradwire.tuning.choices import Chooser
from gradwire.tuning.decisions import Decision
from gradwire.tuning.errors import ErrorTable, measure_errors
from gradwire.tuning.policy import Policy
from gradwire.tuning.policy_state import PolicyState
from gradwire.tuning.reports import StepReport, Want, from_rows, to_row
from gradwire.tuning.sampling import Sample
from gradwire.tuning.saved import write_state
from gradwire.tuning.times import UNKNOWN, StepTimer
from gradwire.tuning.units import units_of

log = logging.getLogger("gradwire")


class Tuner:
    """Measures the steps of one rank, and decides with the other ranks.

    The caller tells it of every bucket that arrives and of every step that ends. At the end of some steps it
    has collective `work`, which the caller runs on every rank; then `conclude` may return a decision.
    """

    def __init__(self, tuning: Tuning, rank: int, world_size: int, *, is_timed: bool = True) -> None:
        """Tune for ``world_size`` ranks; if not ``is_timed``, as if only bytes counted."""
        self.policy = Policy(tuning, needs_times=is_timed)
        self.timer = StepTimer()
        self._tuning = tuning
        self._rank = rank
        self._is_timed = is_timed
        self._world_size = world_size
        self._layouts: dict[int, BucketLayout] = {}
        self._chooser: Chooser | None = None
        self._sample: Sample | None = None
        self._step = 0
        self._want: Want = "nothing"
        self.report: StepReport | None = None
        """The report of the last `work`."""
        self._begun_s: float | None = None
        self._looking_s = 0.0

    @property
    def looking(self) -> float:
        """The part of the time so far that measuring and deciding has taken on this rank."""
        now_s = time.perf_counter()
        return self._looking_s / max(1e-9, now_s - (self._begun_s or now_s))

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Count the time of the block as spent on measuring and deciding."""
        begin_s = time.perf_counter()
        yield
        self._looking_s += time.perf_counter() - begin_s

    @property
    def encodings(self) -> Mapping[str, str]:
        """The present encodings by parameter; others go by the first encoding."""
        choice = self.policy.state.choice
        return {} if choice is None else choice.encodings

    @property
    def exchange(self) -> Exchange:
        """The exchange of the present encodings."""
        return self._tuning.exchange(self.encodings, self.policy.state.apart)

    @property
    def error(self) -> float | None:
        """The relative error that the budget bounds, with the present encodings; None if it is not known."""
        choice = self.policy.state.choice
        return None if choice is None else choice.error

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self.policy.state.decisions)

    def arrive(
        self, layout: BucketLayout, flat: Tensor, step: int, *, is_last: bool, weight: float | None = None
    ) -> None:
        """Take a bucket's sample, if one is needed, and the time; call it before the bucket is averaged.

        ``weight`` is this rank's in a weighted mean; None if all ranks count alike.
        """
        is_first = layout.index == 0
        if is_first:
            self._begin(step)
        if flat.is_sparse:  # sparse gradients are not compressed
            self._layouts.pop(layout.index, None)
        else:
            self._layouts[layout.index] = layout
            self._take_sample(layout, flat, weight)
        if is_first:
            self.timer.begin_averaging(flat.device)
        if is_last:
            self.end_arrivals(layout.index + 1, flat.device)

    def end_arrivals(self, num_buckets: int, device: torch.device) -> None:
        """Note that all buckets of a step have arrived; for a caller that does not know the last one."""
        for stale in [index for index in self._layouts if index >= num_buckets]:
            del self._layouts[stale]
        self.policy.state.units = self._chooser_now().units
        self.timer.end_arrivals(device)

    def end_step(self, step: int, device: torch.device) -> None:
        """Note that all buckets of a step are averaged."""
        self.timer.end(device)
        if self.policy.is_settling(step):
            self.timer.clear()

    @property
    def is_due(self) -> bool:
        """True if there is collective `work` to do after this step: on every rank, or on none."""
        # In a step whose buckets are new, there is no sample.
        return self._want != "nothing" and self._sample is not None and self._sample.is_whole

    def work(self, group: Group, device: torch.device) -> None:
        """Exchange this step's measurements, and keep them as `report`; collective."""
        sample = self._sample
        assert sample is not None
        sample.weigh(group, device)
        table: ErrorTable | None = None
        if self._want == "errors":
            codecs = self._chooser_now().codecs
            table = measure_errors(sample.values.to(device), sample, codecs, group, self._step)
        times, looking = (self.timer.read(), self.looking) if self._is_timed else (UNKNOWN, 0.0)
        own = to_row(times, looking, sample.used_units(), table)
        everyone = gather_rows(torch.tensor(own, dtype=torch.float64, device=device), group)
        self.report = from_rows(everyone.tolist(), len(sample.units), has_table=table is not None)

    def conclude(self, report: StepReport, device: torch.device) -> Decision | None:
        """Return the decision that follows from a report, if there is one."""
        decision = self.policy.conclude(self._step, report, self._chooser_now())
        self.report = self._sample = None
        if decision is not None and self._tuning.log and self._rank == 0:
            log.info("auto, %s", decision)
        if self.policy.starts_anew(self._step):
            self.timer.clear()
        self.timer.begin(device)
        return decision

    def save(self) -> str:
        """Return the policy's state as text."""
        return write_state(self.policy.state)

    def load(self, state: PolicyState | None, step: int, *, look_soon: bool = False) -> None:
        """Go on at ``step`` from a state that was saved; from the beginning, if there is none."""
        is_scattered = self._tuning.is_scattered
        begin = PolicyState(self._tuning.first + 1, since=step, credited=step, is_scattered=is_scattered)
        self.policy = Policy(self._tuning, state or begin, needs_times=self._is_timed)
        self.policy.resume(step, look_soon=look_soon)
        self.timer.clear()
        self._layouts.clear()
        self._sample, self._want, self.report = None, "nothing", None

    def _begin(self, step: int) -> None:
        self._begun_s = self._begun_s or time.perf_counter()
        self._step, self._want = step, self.policy.wants(step)
        self._sample = None
        if self._want != "nothing" and self.policy.state.units:
            self._sample = Sample(self.policy.state.units, step)

    def _take_sample(self, layout: BucketLayout, flat: Tensor, weight: float | None) -> None:
        """Take a bucket's sample, if this step is sampled and the bucket has the units of the step before."""
        if self._sample is None:
            return
        with self.count():
            expected = tuple(unit for unit in self._sample.units if unit.bucket == layout.index)
            if units_of([layout], self._tuning.tables) == expected:
                self._sample.take(layout.index, flat)
                self._sample.weight = weight
            else:
                self._sample = None

    def _chooser_now(self) -> Chooser:
        """Return the chooser of the buckets that were seen last."""
        layouts = tuple(layout for _, layout in sorted(self._layouts.items()))
        if self._chooser is None or self._chooser.layouts != layouts:
            self._chooser = Chooser(layouts, self._tuning, self._world_size)
        return self._chooser
