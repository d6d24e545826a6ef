"""Coalescing: buckets of few bytes that share messages.

A bucket in few bits, or in factors of low rank, is so few bytes that a message costs more than its content.
DDP does not wait for one bucket before it hands over the next, so buckets can wait for one another. On a
worker lane they do not: there, one is computed while another's messages are on their way.
"""

from __future__ import annotations

from gradwire.averaging.job import Job
from gradwire.averaging.pending import Pending

# About what a rank sends at once. Of 1, 2, 4, 8 and 32 MiB the fastest for int8, int4 and sign between two
# processes that share an H200; more would better have been sent during backward.
ENOUGH_BYTES = 4 << 20


class Coalescer:
    """Jobs of one step that wait until their messages are worth sending."""

    def __init__(self, enough_bytes: int = 0) -> None:
        """Let jobs wait until they have ``enough_bytes`` to send; with 0, every job goes by itself."""
        self._enough_bytes = enough_bytes
        self._pending: Pending[Job] = Pending()

    def take(self, job: Job, *, may_wait: bool) -> list[list[Job]]:
        """Take one job, and return the batches of jobs to exchange now, in order."""
        if not (may_wait and self._enough_bytes and job.shared_bytes):
            return [*(self._release() if job.is_last else []), [job]]
        batches = []
        self._pending.add(job)
        if len({each.flat.device for each in self._pending}) > 1:
            *earlier, _ = self._pending.take()
            batches.append(earlier)
            self._pending.add(job)
        if job.is_last or sum(each.shared_bytes for each in self._pending) >= self._enough_bytes:
            batches += self._release()
        return batches

    def give_up(self) -> None:
        """Complete the jobs that wait, as they are."""
        self._pending.give_up()

    def _release(self) -> list[list[Job]]:
        jobs = self._pending.take()
        return [jobs] if jobs else []
