"""Buckets that are exchanged side by side, so that their sums over ranks share messages.

What is left of a bucket in few bits, or in factors of low rank, is so few bytes that a message costs more
than what is in it. DDP does not wait for one bucket before it hands over the next, so buckets can wait for
one another. On a worker lane they do not: there one is computed while another's messages are on their way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.errors import Place, locate
from gradwire.exchanges import Context, Rounds, Scratch, sum_rounds
from gradwire.lanes import Lane, Task, future_for
from gradwire.peers import Group, Traffic

# About what a rank sends at once. Of 1, 2, 4, 8 and 32 MiB the fastest for int8, int4 and sign between two
# processes that share an H200; more would better have been sent during backward.
_ENOUGH_BYTES = 4 << 20

Report = Callable[[Place, Traffic, float | None], None]


@dataclass(frozen=True)
class Bucket:
    """One bucket that waits for others: what to exchange, and how."""

    flat: Tensor
    place: Place
    context_of: Callable[[Tensor, Group, Scratch], Context]
    rounds_of: Callable[[Tensor, Context], Rounds]


class Joint:
    """Buckets of one step that wait until their messages are worth sending."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Bucket, Future[Tensor], torch.cuda.Event | None]] = []
        self._num_bytes = 0

    def add(
        self, lane: Lane, bucket: Bucket, num_bytes: int, report: Report, *, is_last: bool
    ) -> Future[Tensor]:
        """Let a bucket wait that has so many bytes to share, or begin with all that wait."""
        if self._waiting and self._waiting[-1][0].place.bucket >= bucket.place.bucket:
            self._clear()  # of a backward pass that broke off
        if self._waiting and self._waiting[-1][0].flat.device != bucket.flat.device:
            self.release(lane, report)
        future = future_for(bucket.flat)
        cuda = bucket.flat.is_cuda
        ready = torch.cuda.current_stream(bucket.flat.device).record_event() if cuda else None
        self._waiting.append((bucket, future, ready))
        self._num_bytes += num_bytes
        if is_last or self._num_bytes >= _ENOUGH_BYTES:
            self.release(lane, report)
        return future

    def release(self, lane: Lane, report: Report) -> None:
        """Exchange all buckets that wait; their messages are counted as the last one's."""
        if not self._waiting:
            return
        waiting = list(self._waiting)
        self._clear()
        last = waiting[-1][0]
        for earlier, *_ in waiting[:-1]:
            report(earlier.place, Traffic(), None)
        run = functools.partial(_run, [(bucket, ready) for bucket, _, ready in waiting])
        done = lane.submit(Task(last.flat, run, last.place, report))

        def complete(done: Future[Tensor]) -> None:
            for bucket, future, _ready in waiting:
                future.set_result(bucket.flat)

        done.add_done_callback(complete)

    def abandon(self) -> None:
        """Complete all buckets that wait, as they are: there is no last one to wait for."""
        waiting = list(self._waiting)
        self._clear()
        for bucket, future, _ready in waiting:
            future.set_result(bucket.flat)

    def _clear(self) -> None:
        self._waiting.clear()
        self._num_bytes = 0


def _located(rounds: Rounds, place: Place) -> Rounds:
    """The same rounds; an error of theirs says which bucket it is of."""
    try:
        yield from rounds
    except Exception as error:
        raise locate(error, place) from error


def _run(
    buckets: list[tuple[Bucket, torch.cuda.Event | None]], flat: Tensor, group: Group, scratch: Scratch
) -> Tensor:
    rounds, contexts = [], []
    for number, (bucket, ready) in enumerate(buckets):
        if ready is not None:
            torch.cuda.current_stream(bucket.flat.device).wait_event(ready)
        contexts.append(bucket.context_of(bucket.flat, group, scratch.part(number)))
        rounds.append(_located(bucket.rounds_of(bucket.flat, contexts[-1]), bucket.place))
    # What they share lies in the lane's own memory, not in that of one of them.
    sum_rounds(rounds, replace(contexts[0], scratch=scratch))
    return flat
