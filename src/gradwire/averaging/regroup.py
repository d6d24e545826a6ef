"""Regrouping: a step is averaged in other buckets than those in which it arrives.

See Note [Which layout a step is exchanged in] in `timeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.averaging.job import Job
from gradwire.averaging.pending import Pending
from gradwire.averaging.timeline import Grouping, Timeline, grouping_of
from gradwire.buckets import BucketLayout, dtype_named
from gradwire.errors import WireError, locate
from gradwire.lanes import Promise


class Regrouper:
    """Collect the jobs of a step, and replace them by jobs in the grouping that the timeline asks for."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._pending: Pending[Job] = Pending()
        self._layouts: dict[int, BucketLayout] = {}

    def take(self, job: Job, fail: Callable[[WireError], None]) -> list[Job]:
        """Take one job, and return those to average now: this one, none yet, or all of a regrouped step.

        If results cannot be copied back later, ``fail`` is called.
        """
        grouping = self._timeline.at(job.place.step)
        self._note_layout(job)
        if grouping is None:
            return [job]
        self._pending.add(job)
        if not job.is_last:
            return []
        arrived = list(self._pending)
        if grouping_of(each.layout for each in arrived) != grouping:
            regrouped = _regroup(arrived, grouping)
            regrouped[-1].promise.future.add_done_callback(_CopyBack(arrived, regrouped, fail))
        else:
            regrouped = arrived
        self._pending.take()
        return regrouped

    def give_up(self) -> None:
        """Complete the waiting jobs with their values as they are."""
        self._pending.give_up()

    def _note_layout(self, job: Job) -> None:
        """Note the layout; after the last bucket, tell the timeline the grouping of the step."""
        index = job.layout.index
        self._layouts[index] = job.layout
        if job.is_last:
            self._layouts = {each: layout for each, layout in self._layouts.items() if each <= index}
            in_order = [layout for _, layout in sorted(self._layouts.items())]
            self._timeline.arrived(job.place.step, grouping_of(in_order))


def _regroup(arrived: list[Job], grouping: Grouping) -> list[Job]:
    """Return jobs in another grouping, with copies of the values that arrived."""
    slots = {slot.name: slot for job in arrived for slot in job.layout.slots}
    _require_same_parameters(slots.keys(), grouping)
    views = _dense_views(arrived)
    # DDP gives a sparse gradient a bucket of its own in every grouping.
    sparse = {job.layout.slots[0].name: job.flat for job in arrived if job.flat.is_sparse}
    regrouped = []
    for index, (dtype, names) in enumerate(grouping):
        layout = BucketLayout.packed(index, dtype_named(dtype), (slots[name] for name in names))
        flat = sparse.get(names[0])
        if flat is None:
            flat = torch.empty(layout.numel, dtype=layout.dtype, device=arrived[0].flat.device)
            for name, view in layout.views(flat).items():
                view.copy_(views[name])
        place = replace(arrived[0].place, bucket=index)
        is_last = index == len(grouping) - 1
        regrouped.append(
            replace(arrived[0], promise=Promise(flat), layout=layout, place=place, is_last=is_last)
        )
    return regrouped


class _CopyBack:
    """Copy results back to the buckets in which a step arrived, once its last job is done."""

    def __init__(self, arrived: list[Job], regrouped: list[Job], fail: Callable[[WireError], None]) -> None:
        self._arrived = arrived
        self._regrouped = regrouped
        self._fail = fail

    def __call__(self, last: Future[Tensor]) -> None:
        # torch would only log an error raised in this callback, and DDP would wait for ever.
        sparse: dict[str, Tensor] = {}
        try:
            self._copy_back(sparse)
        except Exception as error:
            self._fail(locate(error, self._arrived[-1].place))
        for job in self._arrived:
            job.promise.keep(sparse.get(job.layout.slots[0].name, job.flat))

    def _copy_back(self, sparse: dict[str, Tensor]) -> None:
        views = _dense_views(self._arrived)
        for job in self._regrouped:
            result = job.promise.future.wait()  # done or under way; on CUDA the current stream waits
            if result.is_sparse:
                sparse[job.layout.slots[0].name] = result
                continue
            for name, view in job.layout.views(result).items():
                views[name].copy_(view)


def _dense_views(jobs: list[Job]) -> dict[str, Tensor]:
    """Return every parameter's values, by name, as views of the jobs' buckets."""
    dense = [job for job in jobs if not job.flat.is_sparse]
    return {name: view for job in dense for name, view in job.layout.views(job.flat).items()}


def _require_same_parameters(arrived: Iterable[str], grouping: Grouping) -> None:
    different = set(arrived).symmetric_difference(name for _, names in grouping for name in names)
    if different:
        raise ValueError(
            "this step's parameters are not those of the step before, or of the state that was loaded: they "
            f"differ in {sorted(different)[:5]}; attach again after changing a model's parameters"
        )
