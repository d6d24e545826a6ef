"""Events and figures of a running wire, written to files and to TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from gradwire.buckets import BucketLayout
from gradwire.errors import describe
from gradwire.telemetry.event_files import check_events, open_events
from gradwire.telemetry.meter import Meter
from gradwire.telemetry.stats import ParameterStats, StatsCollector

log = logging.getLogger("gradwire")

_PER_PARAMETER = ("gradient_norm", "relative_error", "cosine", "residual_norm")


class ScalarWriter(Protocol):
    """The part of a TensorBoard ``SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


class HasLayouts(Protocol):
    """The buckets of a wire."""

    def current(self) -> tuple[BucketLayout, ...]:
        """Return the layouts of the most recent step, in bucket order."""
        ...


@dataclass(frozen=True)
class Telemetry:
    """The choice of what `attach` records; ``every`` and ``errors`` must be the same on all ranks.

    Args:
        every: record the figures of every so many steps, beginning with step 0.
        jsonl: append a line of JSON for each event to this file. Rank 0 writes it. If ``{rank}`` is in its
            name, every rank writes a file of its own. Models that train at the same time have different
            files: see docs/telemetry.md for their names.
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or any object with its ``add_scalar``. It gets
            this rank's figures: pass one on one rank, and None on the others.
        errors: also average the gradients of these steps exactly, and record each parameter's relative
            error, cosine and residual norm. That sends as many bytes as ``fp32`` and needs another copy of
            a bucket. On CUDA, the end of such a backward pass waits for the device.

    Raises ValueError if ``every`` is less than 1 or ``jsonl`` is empty, and TypeError for arguments of the
    wrong type.

    >>> Telemetry(every=0)
    Traceback (most recent call last):
    ...
    ValueError: figures are taken every 1 or more steps, not every 0
    """

    every: int = 100
    jsonl: str | os.PathLike[str] | None = None
    writer: ScalarWriter | None = None
    errors: bool = True

    def __post_init__(self) -> None:
        every: object = self.every
        if isinstance(every, bool) or not isinstance(every, int):
            hint = "; a file is given as jsonl=" if isinstance(every, str | os.PathLike) else ""
            raise TypeError(f"every is a number of steps, not {every!r}{hint}")
        if self.every < 1:
            raise ValueError(f"figures are taken every 1 or more steps, not every {self.every}")
        if self.jsonl is not None:
            _check_name(self.jsonl)
        if self.writer is not None and not callable(getattr(self.writer, "add_scalar", None)):
            raise TypeError(f"writer has no add_scalar, unlike a SummaryWriter: {type(self.writer).__name__}")

    def check_file(self, rank: int, *, is_first: bool) -> None:
        """Raise OSError if this rank's events cannot be written; leave no new file behind."""
        if self.jsonl is not None:
            check_events(os.fspath(self.jsonl), rank, is_first=is_first)

    def open_file(self, rank: int, *, is_first: bool) -> TextIO | None:
        """Open the file for this rank's events; return None if it writes none."""
        return None if self.jsonl is None else open_events(os.fspath(self.jsonl), rank, is_first=is_first)


class Recorder:
    """Writes the events and figures of one rank's wire."""

    def __init__(
        self, telemetry: Telemetry, rank: int, layouts: HasLayouts, meter: Meter | None, *, is_first: bool
    ) -> None:
        """Open this rank's file; take the figures of parameters from ``meter``, if there is one.

        ``rank`` is this process's rank in the world, and ``is_first`` is True on the first of the model's.
        """
        self.parameters: tuple[ParameterStats, ...] = ()
        """The figures of the last step that was compared."""
        self._every = telemetry.every
        self._writer = telemetry.writer
        self._rank = rank
        self._layouts = layouts
        self._meter = meter
        self._file = telemetry.open_file(rank, is_first=is_first)
        self._buckets: tuple[BucketLayout, ...] = ()
        self._num_skipped = 0
        self._failure = ""

    def write_event(self, event: str, step: int, **details: Any) -> None:
        """Write one event; numbers that are not finite become null."""
        if self._file is None:
            return
        fields = {"event": event, "time": time.time(), "rank": self._rank, "step": step, **details}
        try:
            self._file.write(json.dumps({key: _finite(value) for key, value in fields.items()}) + "\n")
        except OSError as error:
            # A full disk must not end a run.
            log.warning("rank %d: no more events are written to %s: %s", self._rank, self._file.name, error)
            self._file = None

    def write_failure(self, step: int, error: Exception) -> None:
        """Write an error as an event, once, however often it is raised."""
        if str(error) != self._failure:
            self._failure = str(error)
            self.write_event("failure", step, error=type(error).__name__, text=str(error))

    def end_step(self, step: int, stats: StatsCollector, num_skipped: int) -> None:
        """Write the events of this step's backward pass, and its figures if they are due."""
        if self._buckets != (buckets := self._layouts.current()):
            if self._buckets:
                self.write_event("rebuild", step, buckets=[bucket.numel for bucket in buckets])
            self._buckets = buckets
        if num_skipped != self._num_skipped:
            self._num_skipped = num_skipped
            self.write_event("skip", step, num_skipped=num_skipped)
        if step % self._every == 0:
            self._write_figures(step, stats)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_figures(self, step: int, stats: StatsCollector) -> None:
        figures = stats.of_step(step)
        parameters: dict[str, dict[str, float | None]] = {}
        if self._meter is not None and (compared := self._meter.read()):
            self.parameters = compared
            figures |= combine(self.parameters)
            parameters = {
                each.name: {figure: getattr(each, figure) for figure in _PER_PARAMETER}
                for each in self.parameters
            }
        self.write_event("step", step, **figures, parameters=parameters)
        scalars = {f"gradwire/{figure}": value for figure, value in figures.items()}
        for name, values in parameters.items():
            scalars |= {f"gradwire/{figure}/{name}": value for figure, value in values.items()}
        for tag, value in scalars.items():
            if value is not None and self._writer is not None:
                self._write_scalar(tag, value, step)

    def _write_scalar(self, tag: str, value: float, step: int) -> None:
        assert self._writer is not None
        try:
            self._writer.add_scalar(tag, value, step)
        except Exception as error:  # the user's writer may raise anything, and must not end a run
            log.warning("rank %d: no more scalars are written: %s", self._rank, describe(error))
            self._writer = None


def combine(parameters: Sequence[ParameterStats]) -> dict[str, float | None]:
    """Return the figures of all parameters taken as one vector, without those that are not known."""
    known = [each for each in parameters if each.gradient_norm and each.relative_error is not None]
    exact = math.hypot(*(each.gradient_norm or 0.0 for each in known))
    error = math.hypot(*((each.gradient_norm or 0.0) * (each.relative_error or 0.0) for each in known))
    residuals = [each.residual_norm for each in parameters if each.residual_norm is not None]
    return {
        "gradient_norm": exact,
        "relative_error": error / exact if exact else None,
        "residual_norm": math.hypot(*residuals) if residuals else None,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_name(jsonl: object) -> None:
    """Raise TypeError or ValueError for what is no name of a file."""
    name = os.fspath(jsonl) if isinstance(jsonl, str | os.PathLike) else jsonl
    if not isinstance(name, str):
        raise TypeError(f"jsonl is the name of a file, not {type(name).__name__}")
    if not name:
        raise ValueError("jsonl is the name of a file, not an empty text: leave it out to write none")
