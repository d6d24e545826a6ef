"""Steps that are exchanged in another layout than the one in which their buckets arrive.

Note [Which layout a step is exchanged in]: block scales and seeds depend on where in which bucket a value
lies, and DDP begins every run with other buckets than those it rebuilds after ``num_transient`` steps. If
each step were exchanged as it arrives, a resumed run would differ from one that was not stopped. So a wire
keeps a timeline of layouts, and a checkpoint carries it. In its first ``num_transient`` steps, a run is
exchanged by the timeline, whatever arrives. What arrives after them is the timeline's next entry, from step
``2 * num_transient`` on and not before: so also a run that was resumed from within the first steps, and
sees the rebuilt buckets that much later, changes its layout at the same step. After that, buckets are
exchanged as they arrive, without a copy. (A run that is stopped twice within its first steps, before it
has seen the rebuilt buckets again, cannot know them, and changes its layout later.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.buckets import BucketLayout
from gradwire.errors import Place, WireError, locate
from gradwire.lanes import future_for, pass_on

Grouping = tuple[tuple[str, tuple[str, ...]], ...]
"""Of every bucket its dtype and its parameters' names, in order."""

Submit = Callable[[Tensor, BucketLayout, Place, bool], "Future[Tensor]"]
"""Exchange a bucket; at last, whether it is the step's last one."""
Fail = Callable[[WireError], None]


def grouping_of(layouts: Iterable[BucketLayout]) -> Grouping:
    """How these buckets group the parameters."""
    return tuple(
        (str(layout.dtype).removeprefix("torch."), tuple(slot.name for slot in layout.slots))
        for layout in layouts
    )


class Timeline:
    """From which step on buckets are exchanged in which grouping."""

    def __init__(self, num_transient: int) -> None:
        """After ``num_transient`` steps of a run, DDP rebuilds its buckets; 0 if it never does."""
        self._num_transient = num_transient
        self._first_step = 0
        self._entries: list[tuple[int, Grouping]] = []

    def at(self, step: int) -> Grouping | None:
        """The grouping that ``step`` must be exchanged in; None for the one in which it arrives."""
        settled = max(2 * self._num_transient, self._first_step + self._num_transient)
        if step >= settled:
            return None
        return next((grouping for start, grouping in reversed(self._entries) if start <= step), None)

    def arrived(self, step: int, grouping: Grouping) -> None:
        """Note in which grouping ``step`` has arrived."""
        if not self._entries:
            self._entries = [(step, grouping)]
        elif step >= self._first_step + self._num_transient and self._entries[-1][1] != grouping:
            self._entries.append((max(step, 2 * self._num_transient), grouping))

    def save(self, next_step: int) -> list[tuple[int, Grouping]]:
        """What a run needs to know that goes on with ``next_step``."""
        later = [entry for entry in self._entries if entry[0] > next_step]
        return self._entries[-len(later) - 1 :]

    def load(self, next_step: int, entries: list[tuple[int, Grouping]]) -> None:
        """Go on with ``next_step`` from what `save` returned."""
        self._first_step, self._entries = next_step, list(entries)


@dataclass(frozen=True)
class _Arrival:
    flat: Tensor
    layout: BucketLayout
    place: Place
    future: Future[Tensor]


class Regrouping:
    """Collects the buckets of a step, and exchanges their values in another grouping."""

    def __init__(self) -> None:
        self._arrivals: list[_Arrival] = []

    def add(
        self,
        flat: Tensor,
        layout: BucketLayout,
        place: Place,
        grouping: Grouping,
        submit: Submit,
        fail: Fail,
        *,
        is_last: bool,
    ) -> Future[Tensor]:
        """Take one bucket, and with the last one begin; the future is of the bucket as it arrived."""
        if layout.index == 0:
            self._arrivals.clear()  # of a backward pass that broke off
        arrival = _Arrival(flat, layout, place, future_for(flat))
        self._arrivals.append(arrival)
        if is_last:
            arrivals, self._arrivals = self._arrivals, []
            try:
                _begin(arrivals, grouping, submit, fail)
            except Exception as error:
                fail(locate(error, place))
                _complete(arrivals)
        return arrival.future

    def abandon(self) -> None:
        """Complete what has arrived, as it is: there is no last bucket to wait for."""
        arrivals, self._arrivals = self._arrivals, []
        _complete(arrivals)


def _begin(arrivals: list[_Arrival], grouping: Grouping, submit: Submit, fail: Fail) -> None:
    if grouping_of(arrival.layout for arrival in arrivals) == grouping:
        for arrival in arrivals:
            done = submit(arrival.flat, arrival.layout, arrival.place, arrival is arrivals[-1])
            done.add_done_callback(functools.partial(pass_on, arrival.future))
        return
    # A sparse gradient has a bucket of its own in every grouping.
    sparse = {a.layout.slots[0].name: a for a in arrivals if a.flat.is_sparse}
    views = {
        name: view
        for arrival in arrivals
        if not arrival.flat.is_sparse
        for name, view in arrival.layout.views(arrival.flat).items()
    }
    slots = {slot.name: slot for arrival in arrivals for slot in arrival.layout.slots}
    _require_same_parameters(slots.keys(), grouping)
    exchanged = []
    for index, (dtype, names) in enumerate(grouping):
        layout = BucketLayout.packed(index, getattr(torch, dtype), (slots[name] for name in names))
        place = replace(arrivals[0].place, bucket=index)
        if names[0] in sparse:
            flat = sparse[names[0]].flat
        else:
            flat = torch.empty(layout.numel, dtype=layout.dtype, device=arrivals[0].flat.device)
            for name, view in layout.views(flat).items():
                view.copy_(views[name])
        exchanged.append((layout, submit(flat, layout, place, index == len(grouping) - 1)))

    def finish(last: Future[Tensor]) -> None:
        # torch would only log what is raised here, and DDP would wait for ever.
        results = {}
        try:
            for layout, future in exchanged:
                result = future.wait()  # done or under way elsewhere; on CUDA this waits for its stream
                if result.is_sparse:
                    results[layout.slots[0].name] = result
                else:
                    for name, view in layout.views(result).items():
                        views[name].copy_(view)
        except Exception as error:
            fail(locate(error, arrivals[-1].place))
        _complete(arrivals, results)

    exchanged[-1][1].add_done_callback(finish)


def _complete(arrivals: list[_Arrival], results: dict[str, Tensor] | None = None) -> None:
    for arrival in arrivals:
        name = arrival.layout.slots[0].name
        if not arrival.future.done():
            arrival.future.set_result((results or {}).get(name, arrival.flat))


def _require_same_parameters(arrived: Iterable[str], grouping: Grouping) -> None:
    different = set(arrived).symmetric_difference(name for _, names in grouping for name in names)
    if different:
        raise ValueError(
            "this step's parameters are not those of the step before, or of the state that was loaded: they "
            f"differ in {sorted(different)[:5]}"
        )
