"""The times of a rank's steps, and what they say about other numbers of bytes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

_CPU = torch.device("cpu")
# The most steps that times are taken from, and the least.
_NUM_KEPT, NUM_NEEDED = 16, 4


@dataclass(frozen=True)
class Times:
    """Times of a typical step, in seconds."""

    step: float
    """From the end of one backward pass to the end of the next."""
    exposed: float
    """Communication that nothing hides: from the last bucket's arrival to the end of the backward pass.

    For shards, it is all the time in which a reduce-scatter is under way: gathers of parameters share its
    link, and the pass waits for them. Computing may hide a part of it, so this is the most that it can be.
    """
    averaging: float
    """From the first bucket's arrival to the end of the backward pass."""

    @property
    def is_known(self) -> bool:
        return self.step > 0

    @property
    def share_exposed(self) -> float:
        """The part of a step that is exposed communication."""
        return self.exposed / self.step

    def predict(self, bytes_now: float, bytes_then: float) -> float:
        """Return the time of a step that sends another number of bytes.

        The exposed part grows and shrinks with the bytes. That is cautious: of the communication that the
        backward pass hides, none is counted as saved. The time to encode is not known, so choices are tried.
        """
        return max(0.0, self.step + self.exposed * (bytes_then / max(1.0, bytes_now) - 1))


UNKNOWN = Times(0.0, 0.0, 0.0)


def combine(ranks: Sequence[Times]) -> Times:
    """Return the times of all ranks together: those of the slowest, less what ranks wait for one another.

    The rank that comes last waits least, so the least exposed time is that of communication alone.
    """
    known = [each for each in ranks if each.is_known]
    if not known:
        return UNKNOWN
    return Times(
        max(each.step for each in known),
        min(each.exposed for each in known),
        min(each.averaging for each in known),
    )


class Moment:
    """A moment of a rank's steps: of its device if that is CUDA, otherwise of its host."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._at = time.perf_counter()

    def until(self, later: Moment) -> float:
        """Return the seconds from this moment to a later one; on CUDA, wait for that one."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        return 1e-3 * float(self._event.elapsed_time(later._event))


@dataclass(frozen=True)
class _Step:
    """The moments of one step."""

    before: Moment
    """The end of the step before."""
    first: Moment
    last: Moment
    end: Moment
    exposed_before: list[tuple[Moment, Moment]]
    """Beginnings and ends of exposed communication before the last bucket's arrival; they may overlap."""

    @property
    def seconds(self) -> float:
        return self.before.until(self.end)

    @property
    def exposed(self) -> float:
        spans = [(self.last, self.end), *self.exposed_before]
        total = reached = 0.0
        for begin, end in sorted((self.before.until(begin), self.before.until(end)) for begin, end in spans):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total


class StepTimer:
    """Takes the times of steps; a step costs three moments."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_NUM_KEPT)
        self._exposed_before: list[tuple[Moment, Moment]] = []
        self._end: Moment | None = None
        self._first: Moment | None = None
        self._last: Moment | None = None

    def begin_averaging(self, device: torch.device) -> None:
        """Note the arrival of a step's first bucket."""
        self._first = Moment(device)
        self._exposed_before = []

    @contextlib.contextmanager
    def blocked(self, device: torch.device) -> Iterator[None]:
        """Count the time of the block as one in which the backward pass waits for a bucket."""
        begin = Moment(device)
        yield
        self._exposed_before.append((begin, Moment(device)))

    def count_until_done(self, future: Future[Tensor]) -> None:
        """Count the time until a future on the host completes as exposed; another thread may complete it."""
        begin, spans = Moment(_CPU), self._exposed_before  # of this step, also if a later one has begun
        future.add_done_callback(lambda _: spans.append((begin, Moment(_CPU))))

    def end_arrivals(self, device: torch.device) -> None:
        """Note the arrival of a step's last bucket."""
        self._last = Moment(device)

    def end(self, device: torch.device) -> None:
        """Note the end of a backward pass."""
        before, self._end = self._end, Moment(device)
        if before is not None and self._first is not None and self._last is not None:
            self._steps.append(_Step(before, self._first, self._last, self._end, self._exposed_before))

    def begin(self, device: torch.device) -> None:
        """Let the next step begin now: what was done since the last one ended belongs to no step."""
        self._end = Moment(device)

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def read(self) -> Times:
        """Return medians over the last steps; unknown if there are too few."""
        if len(self._steps) < NUM_NEEDED:
            return UNKNOWN
        steps = list(self._steps)  # an averager's next step may end meanwhile
        taken = [(step.seconds, step.exposed, step.first.until(step.end)) for step in steps]
        return Times(*(statistics.median(each) for each in zip(*taken, strict=True)))
