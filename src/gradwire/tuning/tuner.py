"""The tuner of a wire: it takes samples and times, exchanges them, and asks the policy."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout
from gradwire.peers import Group, gather
from gradwire.recipes import Tuning
from gradwire.tuning.choices import Choosing
from gradwire.tuning.decisions import Decision
from gradwire.tuning.errors import ErrorTable, measure_errors
from gradwire.tuning.policy import Policy, combine_used
from gradwire.tuning.policy_state import PolicyState, StepReport, Want
from gradwire.tuning.sampling import Sample
from gradwire.tuning.saved import write_state
from gradwire.tuning.times import UNKNOWN, StepTimer, Times, combine

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
        self._choosing: tuple[tuple[BucketLayout, ...], Choosing] | None = None
        self._sample: Sample | None = None
        self._step = 0
        self._want: Want = "nothing"
        self._report: StepReport | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self.policy.state.decisions)

    def arrive(self, layout: BucketLayout, flat: Tensor, step: int, *, is_last: bool) -> None:
        """Take a bucket's sample, if one is needed, and the time; call it before the bucket is averaged."""
        is_first = layout.index == 0
        if is_first:
            self._begin(step)
        if flat.is_sparse:  # sparse gradients are not compressed
            self._layouts.pop(layout.index, None)
        elif self._layouts.get(layout.index) != layout:
            self._layouts[layout.index] = layout
            self._sample = None  # its units are those of other buckets
        if is_last:
            for stale in [index for index in self._layouts if index > layout.index]:
                del self._layouts[stale]
        if self._sample is not None and not flat.is_sparse:
            self._sample.take(layout.index, flat)
        self.timer.arrive(flat.device, is_first=is_first, is_last=is_last)

    def end_step(self, step: int, device: torch.device) -> bool:
        """Note the end of a backward pass; return True if there is collective `work` to do now."""
        self.timer.end(device)
        if self.policy.is_settling(step):
            self.timer.clear()
        # In a step whose buckets are new, there is no sample. That is so on every rank.
        return self._want != "nothing" and self._sample is not None and self._sample.is_whole

    def work(self, group: Group, device: torch.device) -> None:
        """Exchange this step's measurements; collective."""
        sample = self._sample
        assert sample is not None
        times, used = self.timer.read() if self._is_timed else UNKNOWN, sample.used_units()
        own = [times.step, times.exposed, times.averaging, *map(float, used)]
        table: ErrorTable | None = None
        if self._want == "errors":
            codecs = self._choosing_now().codecs
            table = measure_errors(sample.values.to(device), sample, codecs, group, self._step)
            # The same on every rank, unless their kernels differ. All take rank 0's.
            own += [*table.norms, *(error for row in table.errors for error in row)]
        ranks = _gather(own, group, device)
        num_units = len(sample.units)
        if table is not None:
            figures = ranks[0][3 + num_units :]
            rest, width = figures[num_units:], len(self._tuning.encodings)
            table = ErrorTable(
                figures[:num_units], [rest[width * u : width * (u + 1)] for u in range(num_units)]
            )
        self._report = StepReport(
            combine([Times(*row[:3]) for row in ranks]),
            combine_used([[each > 0 for each in row[3 : 3 + num_units]] for row in ranks]),
            table,
        )

    def conclude(self, device: torch.device) -> Decision | None:
        """Return the decision that follows from the last `work`, if there is one."""
        assert self._report is not None
        decision = self.policy.conclude(self._step, self._report, self._choosing_now())
        self._report = None
        if decision is not None:
            self.timer.clear()
            if self._tuning.log and self._rank == 0:
                log.info("auto, %s", decision)
        self.timer.begin(device)
        return decision

    def save(self) -> str:
        """Return the policy's state as text."""
        return write_state(self.policy.state)

    def load(self, state: PolicyState | None, step: int, *, look_soon: bool = False) -> None:
        """Go on at ``step`` from a state that was saved; from the beginning, if there is none."""
        self.policy = Policy(self._tuning, state or PolicyState(since=step), needs_times=self._is_timed)
        self.policy.resume(step, look_soon=look_soon)
        self.timer.clear()

    def _begin(self, step: int) -> None:
        self._step, self._want = step, self.policy.wants(step)
        self._sample = None
        if self._want != "nothing" and self._layouts:
            self._sample = Sample(self._choosing_now().units, step)

    def _choosing_now(self) -> Choosing:
        layouts = tuple(layout for _, layout in sorted(self._layouts.items()))
        if self._choosing is None or self._choosing[0] != layouts:
            self._choosing = layouts, Choosing(layouts, self._tuning, self._world_size)
        return self._choosing[1]


def _gather(own: Sequence[float], group: Group, device: torch.device) -> list[list[float]]:
    """Return every rank's numbers, in rank order; collective."""
    rows = torch.zeros((group.size, len(own)), dtype=torch.float64, device=device)
    rows[group.rank] = torch.tensor(own, dtype=torch.float64)
    if group.size > 1:
        gather(list(rows.view(torch.uint8)), group)
    gathered: list[list[float]] = rows.tolist()
    return gathered
