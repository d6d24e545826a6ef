"""Jobs: buckets on their way through the engine."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradwire.averaging.scaling import Scaling
from gradwire.buckets import BucketLayout, Memory
from gradwire.errors import Place, locate
from gradwire.exchanges import Context, Exchange, Rounds, Scratch, average, run_rounds
from gradwire.lanes import Promise, RepeatKey
from gradwire.peers import Group


@dataclass(frozen=True, eq=False)
class Job:
    """One bucket to average: its values, its layout, its place in the run, the exchange and the scaling."""

    promise: Promise
    layout: BucketLayout
    place: Place
    exchange: Exchange
    scaling: Scaling
    is_last: bool
    may_overlap: bool = True
    """True if other jobs may run beside it."""

    @property
    def flat(self) -> Tensor:
        return self.promise.flat

    @functools.cached_property
    def shared_bytes(self) -> int:
        """The bytes of this bucket in messages that other buckets can share."""
        return 0 if self.flat.is_sparse else self.exchange.shared_bytes(self.layout, self.place.step)


def run_jobs(
    jobs: Sequence[Job],
    memory: Memory,
    may_have_unused: bool,
    flats: Sequence[Tensor],
    group: Group,
    scratch: Scratch,
    step_on_device: Tensor | None = None,
) -> Sequence[Tensor]:
    """Average jobs side by side, so that they share messages; return their results.

    A lane calls this. It passes the jobs' values as ``flats``, on a device that its group can send from. If
    it records the work, it passes the step on the device, too.
    """
    contexts = [
        Context(
            group,
            scratch if len(jobs) == 1 else scratch.part(number),
            job.scaling.begin(flat, group),
            job.layout,
            memory,
            job.place.step,
            may_have_unused,
            step_on_device,
            job.scaling.divisor,
        )
        for number, (job, flat) in enumerate(zip(jobs, flats, strict=True))
    ]
    if len(jobs) == 1:
        return [average(flats[0], jobs[0].exchange, contexts[0])]
    rounds = [
        _located(job.exchange.rounds(flat, context), job.place)
        for job, flat, context in zip(jobs, flats, contexts, strict=True)
    ]
    # Shared messages use the lane's scratch memory itself; each job has a part of its own.
    run_rounds(rounds, replace(contexts[0], scratch=scratch))
    return flats


def repeat_key(jobs: Sequence[Job], memory: Memory, may_have_unused: bool) -> RepeatKey | None:
    """Return what the work of `run_jobs` on a device depends on; None if it may differ in every step."""
    facts: list[Hashable] = [may_have_unused, id(memory), memory.version]
    objects: list[object] = [memory]
    for job in jobs:
        key = None if job.flat.is_sparse else job.exchange.repeats_as(job.place.step)
        if key is None:
            return None
        flat, scaling = job.flat, job.scaling
        facts += [key, flat.data_ptr(), flat.dtype, id(job.layout), id(job.exchange)]
        facts += [scaling.reduction, scaling.is_active, scaling.weight, scaling.given]
        objects += [job.layout, job.exchange]
    return RepeatKey(tuple(facts), tuple(objects))


def reads_step(jobs: Sequence[Job]) -> bool:
    """Return True if kernels of these jobs read the step on the device: rotations differ in every step."""
    return any("rotated" in job.exchange.kernels for job in jobs)


def _located(rounds: Rounds, place: Place) -> Rounds:
    """Yield the same rounds; add the job's place to an error in them."""
    try:
        yield from rounds
    except Exception as error:
        raise locate(error, place) from error
