"""Tasks that a lane runs, and promises that it keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.errors import Place
from gradwire.exchanges import Scratch
from gradwire.lanes.current_stream import record_end_of
from gradwire.lanes.recordings import Repeat
from gradwire.peers import Group, Traffic

Run = Callable[[Sequence[Tensor], Group, Scratch], Sequence[Tensor]]
"""Average the values of one or more buckets, and return the results."""

Report = Callable[[Place, Traffic, "float | None"], None]
"""Take the figures of a task: its traffic, and the seconds it took or None if they are not known."""

CollectiveWork = Callable[[Group, torch.device], None]
"""Exchange messages that belong to no bucket, with tensors on the given device."""


class Promise:
    """One bucket's values, and the future of their result.

    DDP waits for the future without a time limit, so every promise is completed: with a result, or with the
    values as they are. Only the first completion counts.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.future: Future[Tensor] = Future(devices=[flat.device]) if flat.is_cuda else Future()
        # Marks when the values are complete on the device; the task may be submitted much later.
        self.ready = record_end_of(flat) if flat.is_cuda else None
        self._lock = threading.Lock()
        self._is_kept = False

    def keep(self, result: Tensor) -> None:
        """Complete the future with ``result``, unless it is completed."""
        with self._lock:
            if self._is_kept:
                return
            self._is_kept = True
        self.future.set_result(result)

    def give_up(self) -> None:
        """Complete the future with the values as they are, unless it is completed."""
        self.keep(self.flat)


def completed(value: Tensor) -> Future[Tensor]:
    """Return a future that already holds ``value``, as it is on the current stream."""
    # Without devices, as in torch's own noop_hook: it is read on the stream that wrote it.
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


def report_nothing(place: Place, traffic: Traffic, elapsed_s: float | None) -> None:
    """Ignore the figures of a task that belongs to no bucket."""


@dataclass(frozen=True)
class Task:
    """Work for a lane: the averaging of one or more buckets."""

    run: Run
    promises: tuple[Promise, ...]
    place: Place
    report: Report = report_nothing
    overlaps: bool = False
    """True if it may run beside other tasks that overlap; otherwise it runs alone."""
    repeat: Repeat | None = None
    """The way in which a lane on a stream records the task, to replay it later; None if it cannot."""

    @property
    def flats(self) -> list[Tensor]:
        return [promise.flat for promise in self.promises]

    def results(self, flats: Sequence[Tensor], group: Group, scratch: Scratch) -> list[Tensor]:
        """Run the task on ``flats``, and return one result for each promise."""
        results = list(self.run(flats, group, scratch))
        assert len(results) == len(self.promises), "a task returns a result for each bucket"
        return results

    def keep(self, results: Sequence[Tensor]) -> None:
        """Keep all promises."""
        for promise, result in zip(self.promises, results, strict=True):
            promise.keep(result)


def collective_task(work: CollectiveWork, place: Place, device: torch.device) -> Task:
    """Return a task that runs ``work`` on every rank, after all tasks before it."""

    def run(flats: Sequence[Tensor], group: Group, scratch: Scratch) -> Sequence[Tensor]:
        work(group, flats[0].device)
        return flats

    return Task(run, (Promise(torch.empty(0, device=device)),), place)
