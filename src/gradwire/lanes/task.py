"""What a lane runs, and what it gives for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.futures import Future

from gradwire.errors import Place
from gradwire.exchanges import Scratch
from gradwire.peers import Group, Traffic

Run = Callable[[Tensor, Group, Scratch], Tensor]


@dataclass(frozen=True)
class Task:
    """One bucket's exchange: what to run on which values, and whom to tell about it."""

    flat: Tensor
    run: Run
    place: Place
    report: Callable[[Place, Traffic, float | None], None]
    overlaps: bool = False
    """Whether it may run beside others that overlap; else all before it are over, and none after it begun."""


def report_nothing(place: Place, traffic: Traffic, elapsed_s: float | None) -> None:
    """For a task that belongs to no bucket, or to one that has been reported."""


def in_this_process(end: Callable[..., None]) -> Callable[..., None]:
    """``end``, which does nothing in a process forked off this one: the connections are not its own."""
    pid = os.getpid()

    def end_here(*args: object) -> None:
        if os.getpid() == pid:
            end(*args)

    return end_here


def future_for(value: Tensor) -> Future[Tensor]:
    """An open future that can hold a tensor on the device of ``value``."""
    return Future(devices=[value.device]) if value.is_cuda else Future()


def pass_on(future: Future[Tensor], done: Future[Tensor]) -> None:
    """Complete ``future`` with what ``done`` holds, unless it was given up."""
    if not future.done():
        future.set_result(done.value())
