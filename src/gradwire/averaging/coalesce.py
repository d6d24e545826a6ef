"""Coalescing: small buckets wait for one another and share messages.

A bucket in few bits, or in low-rank factors, is so small that a message costs more than its content.
DDP hands over the next bucket without waiting for the last one, so buckets can wait for one another. On a
worker lane they do not, unless ranks are far apart: one bucket is encoded while the messages of another
travel.
"""

from __future__ import annotations

from gradwire.averaging.job import Job
from gradwire.averaging.pending import Pending
from gradwire.lanes import Lane

# Bytes that a rank sends at once. Between two ranks that run at the same time on an H200, a step with int4
# took 39.8 ms with 1 MiB and 36.9 with 4; by messages from rank to rank 40.4 with 4, and 44.1 with 16. int2
# and powersgd are 2 and 5 % faster with 1 MiB, and take 4 ms more of the host's time. Larger batches leave
# more to send after the backward pass. On a far link, a TCP connection has about as much under way at most:
# Linux gives it 4 MiB to send from (tcp_wmem).
ENOUGH_BYTES = 4 << 20


class Coalescer:
    """Jobs of one step that wait until their messages are worth sending."""

    def __init__(self, enough_bytes: int = 0) -> None:
        """Let jobs wait until they have ``enough_bytes`` to send; with 0, no job waits."""
        self._enough_bytes = enough_bytes
        self._pending: Pending[Job] = Pending()

    @classmethod
    def for_lane(cls, lane: Lane) -> Coalescer:
        """Return a coalescer that lets jobs wait if that pays on ``lane``."""
        return cls(ENOUGH_BYTES if lane.shares_messages else 0)

    def take(self, job: Job, *, may_wait: bool) -> list[list[Job]]:
        """Take one job, and return the batches of jobs to exchange now, in order.

        A job that cannot share messages, or with ``may_wait=False``, is a batch of its own.
        """
        if not (may_wait and self._enough_bytes and job.shared_bytes):
            return [*(self.release() if job.is_last else []), [job]]
        batches = []
        self._pending.add(job)
        if len({each.flat.device for each in self._pending}) > 1:
            *earlier, _ = self._pending.take()
            batches.append(earlier)
            self._pending.add(job)
        if job.is_last or sum(each.shared_bytes for each in self._pending) >= self._enough_bytes:
            batches += self.release()
        return batches

    def give_up(self) -> None:
        """Complete the waiting jobs with their values as they are."""
        self._pending.give_up()

    def release(self) -> list[list[Job]]:
        """Return the waiting jobs as a batch, if there are any."""
        jobs = self._pending.take()
        return [jobs] if jobs else []
