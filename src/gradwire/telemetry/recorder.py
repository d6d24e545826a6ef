"""What a wire tells about itself while it runs, to those who want to know."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from gradwire.buckets import BucketLayout, Layouts
from gradwire.errors import describe
from gradwire.telemetry.meter import Meter
from gradwire.telemetry.stats import ParameterStats, StatsBook

log = logging.getLogger("gradwire")


class ScalarWriter(Protocol):
    """What is used of a TensorBoard ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


@dataclass(frozen=True)
class Telemetry:
    """What `attach` is to record; every rank passes one with the same ``every`` and ``errors``.

    Args:
        every: a step's figures are taken every so many steps, beginning with step 0.
        jsonl: a file that gets a line of JSON for each event, behind what it has already: of rank 0, or, if
            ``{rank}`` stands in its name, of every rank in a file of its own.
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or what else has its ``add_scalar``. It gets
            this rank's figures, so pass one on one rank, and None on the others.
        errors: whether these steps also average their gradients uncompressed, to tell each parameter's
            relative error, cosine and residual norm. That sends as much as ``fp32`` does and needs another
            copy of a bucket; on CUDA, the end of such a backward pass waits for the device.

    Raises ValueError for ``every`` less than 1, TypeError for a file or writer that is none.

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
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise TypeError(f"every is a number of steps, not {self.every!r}")
        if self.every < 1:
            raise ValueError(f"figures are taken every 1 or more steps, not every {self.every}")
        if self.jsonl is not None and not isinstance(self.jsonl, str | os.PathLike):
            raise TypeError(f"jsonl is the name of a file, not {type(self.jsonl).__name__}")
        if self.writer is not None and not callable(getattr(self.writer, "add_scalar", None)):
            raise TypeError(f"writer has no add_scalar, unlike a SummaryWriter: {type(self.writer).__name__}")

    def check_file(self, rank: int) -> None:
        """OSError if this rank's events cannot be written; leaves no file that was not there."""
        path = self._path(rank)
        if path is not None:
            was_there = path.exists()
            path.open("a").close()
            if not was_there:
                path.unlink()

    def open_file(self, rank: int) -> TextIO | None:
        """The file that this rank's events go to, if any."""
        path = self._path(rank)
        # By lines: what was told before a crash is in the file.
        return None if path is None else path.open("a", buffering=1, encoding="utf-8")

    def _path(self, rank: int) -> Path | None:
        name = "" if self.jsonl is None else os.fspath(self.jsonl)
        is_own = self.jsonl is not None and (rank == 0 or "{rank}" in name)
        return Path(name.replace("{rank}", str(rank))).resolve() if is_own else None


class Recorder:
    """Events and figures of one rank's wire."""

    def __init__(self, telemetry: Telemetry, rank: int, layouts: Layouts, meter: Meter | None) -> None:
        """Open this rank's file, and take figures of parameters from ``meter``, if there is one."""
        self.parameters: tuple[ParameterStats, ...] = ()
        self._every = telemetry.every
        self._writer = telemetry.writer
        self._rank = rank
        self._layouts = layouts
        self._meter = meter
        self._file = telemetry.open_file(rank)
        self._buckets: tuple[BucketLayout, ...] = ()
        self._num_skipped = 0
        self._failure = ""

    def tell(self, event: str, step: int, **details: Any) -> None:
        """Write one event; numbers that are not finite become null."""
        if self._file is None:
            return
        told = {"event": event, "time": time.time(), "rank": self._rank, "step": step, **details}
        try:
            self._file.write(json.dumps({key: _finite(value) for key, value in told.items()}) + "\n")
        except OSError as error:
            # A full disk is no reason to end a run, least of all on one rank.
            log.warning("rank %d: no more events are written to %s: %s", self._rank, self._file.name, error)
            self._file = None

    def tell_failure(self, step: int, error: Exception) -> None:
        """Write an error, once, however often it is raised."""
        if str(error) != self._failure:
            self._failure = str(error)
            self.tell("failure", step, error=type(error).__name__, text=str(error))

    def end_step(self, step: int, book: StatsBook, num_skipped: int) -> None:
        """Tell what the backward pass of this step has brought."""
        if self._buckets != (buckets := self._layouts.current()):
            if self._buckets:
                self.tell("rebuild", step, buckets=[bucket.numel for bucket in buckets])
            self._buckets = buckets
        if num_skipped != self._num_skipped:
            self._num_skipped = num_skipped
            self.tell("skip", step, num_skipped=num_skipped)
        if step % self._every == 0:
            self._tell_figures(step, book)

    def _tell_figures(self, step: int, book: StatsBook) -> None:
        figures = book.of_step(step)
        parameters: dict[str, dict[str, float | None]] = {}
        if self._meter is not None and (found := self._meter.read()):
            self.parameters = found
            figures |= _together(self.parameters)
            parameters = {
                each.name: {figure: getattr(each, figure) for figure in _PER_PARAMETER}
                for each in self.parameters
            }
        self.tell("step", step, **figures, parameters=parameters)
        scalars = {f"gradwire/{figure}": value for figure, value in figures.items()}
        for name, own in parameters.items():
            scalars |= {f"gradwire/{figure}/{name}": value for figure, value in own.items()}
        for tag, value in scalars.items():
            if value is not None and self._writer is not None:
                self._write_scalar(tag, value, step)

    def _write_scalar(self, tag: str, value: float, step: int) -> None:
        assert self._writer is not None
        try:
            self._writer.add_scalar(tag, value, step)
        except Exception as error:  # the user's own, and no reason to end a run either
            log.warning("rank %d: no more scalars are written: %s", self._rank, describe(error))
            self._writer = None

    def close(self) -> None:
        """Close the file; what is told afterwards is lost."""
        if self._file is not None:
            self._file.close()
            self._file = None


_PER_PARAMETER = ("gradient_norm", "relative_error", "cosine", "residual_norm")


def _together(parameters: Sequence[ParameterStats]) -> dict[str, float | None]:
    """The figures of all parameters as if they were one; those that are not known are left out."""
    known = [each for each in parameters if each.gradient_norm and each.relative_error is not None]
    exact = math.hypot(*(each.gradient_norm or 0.0 for each in known))
    error = math.hypot(*((each.gradient_norm or 0.0) * (each.relative_error or 0.0) for each in known))
    held = [each.residual_norm for each in parameters if each.residual_norm is not None]
    return {
        "gradient_norm": exact,
        "relative_error": error / exact if exact else None,
        "residual_norm": math.hypot(*held) if held else None,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
