"""Tasks: what a lane runs, and the promises that it keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.errors import Place
from gradwire.exchanges import Scratch
from gradwire.peers import Group, Traffic

Run = Callable[[Sequence[Tensor], Group, Scratch], Sequence[Tensor]]
"""Turn the values of some buckets into their results."""

Report = Callable[[Place, Traffic, "float | None"], None]
"""Take the figures of a task: what it sent, and the seconds it took, if they are known."""

CollectiveWork = Callable[[Group, torch.device], None]
"""Exchange messages that belong to no bucket, with tensors on the given device."""


class Promise:
    """One bucket's values, and the future that will hold their result.

    DDP waits for the future without a limit, so it is always completed: with a result, or with the values
    as they are. It is completed once, by whoever comes first.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.future: Future[Tensor] = Future(devices=[flat.device]) if flat.is_cuda else Future()
        # When the values are there on the device: the task may be submitted much later.
        self.ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        self._lock = threading.Lock()
        self._is_kept = False

    def keep(self, result: Tensor) -> None:
        """Complete the future with ``result``, unless that has been done."""
        with self._lock:
            if self._is_kept:
                return
            self._is_kept = True
        self.future.set_result(result)

    def give_up(self) -> None:
        """Complete the future with the values as they are, unless that has been done."""
        self.keep(self.flat)


def completed(value: Tensor) -> Future[Tensor]:
    """Return a future that holds ``value`` already."""
    promise = Promise(value)
    promise.give_up()
    return promise.future


def report_nothing(place: Place, traffic: Traffic, elapsed_s: float | None) -> None:
    """Ignore the figures of a task that belongs to no bucket."""


@dataclass(frozen=True)
class Task:
    """Work for a lane: the exchange of one or more buckets."""

    run: Run
    promises: tuple[Promise, ...]
    place: Place
    report: Report = report_nothing
    overlaps: bool = False
    """True if it may run beside others that overlap; else it has the lane to itself."""

    @property
    def flats(self) -> list[Tensor]:
        return [promise.flat for promise in self.promises]

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
