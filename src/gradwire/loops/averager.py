"""The averager: the engine as an object, for loops without DDP."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.averaging import (
    Engine,
    Grid,
    RunState,
    Timeline,
    Tuned,
    checkpoint,
    disabling_claim,
    is_disabled,
    open_engine,
)
from gradwire.errors import Place, WireError, locate
from gradwire.lanes import Uncopied, open_lane
from gradwire.loops.choices import (
    agree_on_recipe,
    check_weight,
    choose_device,
    choose_group,
    keeps_state,
    require_nothing_owed,
)
from gradwire.loops.chunks import chunk_of, make_full, require_flat
from gradwire.loops.halves import HalfRunner, compare
from gradwire.loops.handle import AveragingHandle
from gradwire.loops.packing import Packing, Packings
from gradwire.loops.plain import PlainEngine, PlainHalves
from gradwire.loops.tensors import Tensors, named_tensors
from gradwire.peers import CollectiveCall, own_world_rank, require_timeout, timeout_or_own, uses_nccl
from gradwire.recipes import (
    Recipe,
    WirePlan,
    fingerprint,
    gathered,
    make_plan,
    require_fixed,
    scattered,
)
from gradwire.telemetry import WireStats
from gradwire.tuning import Decision

log = logging.getLogger("gradwire")


class Averager(Uncopied):
    """Average tensors over the ranks of a process group, by a recipe, in a loop of your own.

    Args:
        recipe: a name (``"bf16"``), a name with options (``"int4:block=64"``), or a `Recipe`.
        group: the ranks to average over, a Gloo or NCCL group; by default the world.
        device: where the tensors are. By default CUDA for a group that has NCCL there, otherwise CPU. Over
            Gloo, CUDA tensors are taken too.
        timeout: how long the constructor, `swap` and `load_state_dict` wait for the other ranks; by default
            as long as the group does. Averages always wait as long as the group.

    Raises ValueError if there is no such recipe or ranks differ, TypeError for arguments of the wrong type,
    and RuntimeError if a rank does not come in time.

    The constructor is collective, and so are `average_`, `start`, `reduce_scatter`, `all_gather`, `swap` and
    `load_state_dict`: every rank calls them in the same order, with the same tensors. What a recipe keeps
    from call to call belongs to a tensor's name; tensors without names are numbered. With
    ``GRADWIRE_DISABLE=1`` in the environment, torch's own ``all_reduce`` averages.

    >>> averager = gradwire.Averager("int4")
    >>> model.module(inputs).sum().backward()
    >>> averager.average_({name: p.grad for name, p in model.named_parameters()})
    """

    def __init__(
        self,
        recipe: str | Recipe = "fp32",
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._group = choose_group(group)
        self._name = own_world_rank(self._group)
        self._timeout = timeout_or_own(timeout, self._group)
        with CollectiveCall(self._group, self._timeout, "gradwire.Averager") as call:
            require_timeout(timeout)
            self._device = choose_device(self._group, device)
            self._recipe = agree_on_recipe(recipe, self._device, call, disabling_claim())
        self._num_calls = self._first_call = 0
        self._packings = Packings()
        self._in_flight: list[AveragingHandle] = []
        self._may_have_state = keeps_state(self._recipe)
        self._is_closed = False
        self._closed_with: WireError | None = None
        self._is_nccl = uses_nccl(self._group, self._device)
        self._device_types = ("cuda",) if self._is_nccl else ("cpu", "cuda")
        state = RunState(timeline=Timeline(None))
        self._engine: Engine | PlainEngine
        self._halves: HalfRunner | PlainHalves
        if is_disabled():
            log.warning("GRADWIRE_DISABLE is set: torch averages instead of %s", self._recipe)
            self._engine = PlainEngine(self._recipe, self._group, state)
            self._halves = PlainHalves(self._group)
        else:
            self._engine = open_engine(
                self._recipe, self._group, self._device, call.rendezvous, state, may_wait=True
            )
            self._halves = HalfRunner(self._engine, self._device if self._is_nccl else None)
        self._tuned = self._make_tuner()

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @property
    def failure(self) -> WireError | None:
        """The first error of any rank, if there was one; also after `close`."""
        return self._closed_with if self._is_closed else self._engine.failure

    def average_(self, tensors: Tensors, weight: float | None = None) -> None:
        """Replace tensors by their mean over ranks; collective.

        Args:
            tensors: a tensor, a list of tensors, or a dict by name: dense, floating or complex. Every rank
                gives the same names, shapes and dtypes, in the same order.
            weight: this rank's weight in the mean, for example the size of its batch. A rank may have 0,
                and then its values do not count. If all have 0, that is a ValueError on CPU, and the mean is
                NaN on CUDA. None if all ranks count alike.

        Raises TypeError for what cannot be averaged. Raises ValueError if ranks give different tensors, if
        a tensor's shape is not that of what the recipe keeps for its name, or if the recipe cannot weigh.
        Each is a `WireError` too, and other ranks raise `PeerError`. The averager has then failed.

        Example::

            averager.average_([p.grad for p in model.parameters()], weight=len(batch))
        """
        self.start(tensors, weight).wait()

    def start(self, tensors: Tensors, weight: float | None = None) -> AveragingHandle:
        """Begin what `average_` does, and return a handle to wait for; collective.

        Several averagings may be under way. Do not touch the tensors until the handle has been waited for.

        Example::

            handle = averager.start(gradients)
            ...  # compute something else
            handle.wait()
        """
        place = self._begin_call()
        self._in_flight = [handle for handle in self._in_flight if not handle.done()]
        with self._failing_all(place):
            self._decide()
            self._require_usable()
            named = named_tensors(tensors, self._device_types)
            weight = self._checked(weight, named)
            packing = self._packing_of(named, weight is not None, place)
            futures = self._start(packing, named, weight, place)
            if self._tuned is not None:
                self._tuned.start_report(place, self._device)

        def end(results: list[Tensor]) -> None:
            self._require_usable()
            if self._tuned is not None:
                self._tuned.end_step(place, self._device)
            packing.unpack(results, named)
            self._in_flight = [other for other in self._in_flight if other is not handle]

        handle = AveragingHandle(futures, packing.names, end)
        self._in_flight.append(handle)
        return handle

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        """Return this rank's chunk of the mean over ranks of ``flat``; collective.

        Args:
            flat: a flat tensor of floating values, of the same length on every rank. It is cut into as many
                chunks as there are ranks. If its length is not a multiple of that, sizes differ by one. Its
                values are undefined afterwards.

        Sends half of what `average_` does. Chunks are summed in fp32 and in rank order, and sums are not
        encoded again. There are no residuals: ``int4`` goes without its own. Raises ValueError for low rank,
        for ``auto`` and for a recipe that asks for residuals, and otherwise as `average_` does.

        Example::

            shard = averager.reduce_scatter(gradients)
            flat = averager.all_gather(shard, numel=len(gradients))
        """
        require_fixed(self._recipe, "reduce_scatter")
        recipe, place = scattered(self._recipe), self._begin_call()
        with self._failing_all(place):
            own = require_flat(flat, self._device_types)
            self._halves.run("reduce_scatter", recipe, own, place)
            self._require_usable()
        return chunk_of(own, self._group).clone()

    def all_gather(self, shard: Tensor, numel: int | None = None) -> Tensor:
        """Return all ranks' shards, one after the other; collective.

        Args:
            shard: a flat tensor of floating values.
            numel: the length of the result. By default all shards are of one size.

        Shards travel by the recipe, and every rank gets the same bits. Raises ValueError as `reduce_scatter`
        does, and for a shard that is not this rank's chunk of ``numel`` values.
        """
        recipe, place = gathered(self._recipe), self._begin_call()
        with self._failing_all(place):
            full = make_full(require_flat(shard, self._device_types), numel, self._group)
            self._halves.run("all_gather", recipe, full, place)
            self._require_usable()
        return full

    def stats(self) -> WireStats:
        """Return bytes, messages, and times of waiting and working; each call counts as a step."""
        return self._engine.stats.read(self._num_calls - self._first_call)

    def plan(self, tensors: Tensors | None = None, step: int | None = None) -> WirePlan:
        """Return what a call sends for ``tensors``, by default those of the last call; ``print`` it.

        For a recipe that changes by step, this is the plan of ``step``, by default of the stage that sends
        most. On Gloo, each call sends every other rank another 24 bytes, to compare lists of tensors.

        Raises ValueError if no tensors are given or averaged yet.
        """
        packing = self._packings.last
        if tensors is not None:
            packing, _ = Packings().of(named_tensors(tensors, self._device_types))
        if packing is None:
            raise ValueError("nothing has been averaged yet, so there is no plan: give the tensors")
        recipe = self._recipe if self._tuned is None else self._engine.recipe
        return make_plan(recipe, packing.layouts, self._group.rank(), self._group.size(), step)

    def decisions(self) -> tuple[Decision, ...]:
        """Return the decisions of recipe ``auto`` so far, the same on every rank; none for other recipes."""
        return () if self._tuned is None else self._tuned.decisions

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume bit for bit: residuals and other states, and the step count.

        The state is copies of tensors, and numbers. Each rank saves its own. Waits for what is under way.
        """
        self._wait_for_lane()
        self._decide()
        run, grid = self._engine.state, Grid(self._group.size())
        tuning = None if self._tuned is None else self._tuned.save()
        return run.save(str(self._recipe), self._num_calls, self._group.rank(), grid, tuning)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; collective.

        Args:
            state: this rank's state. If the number of ranks has changed, `merge_state_dicts` of all ranks'.

        On the same number of ranks, the calls that follow are bit for bit those of a run that was not
        stopped. On another number, the ranks together hold back as much as before.

        Raises ValueError on every rank, and loads nothing, if an entry is missing or ranks differ.
        """
        self._require_usable()
        with CollectiveCall(self._group, self._timeout, "Averager.load_state_dict") as call:
            rank, size = self._group.rank(), self._group.size()
            saved = checkpoint.read(state, None, (), rank, Grid(size), self._recipe.reduction)
            policy = None if self._tuned is None else self._tuned.read(saved)
            facts = {"the saved step": str(saved.step), "the saved tuning": saved.tuning or "none"}
            call.agree({**facts, **fingerprint.of_version()})
        self._wait_for_lane()
        self._first_call += saved.step - self._num_calls
        self._num_calls = saved.step
        self._may_have_state |= bool(saved.memory)
        self._engine.state.load(saved, self._device)
        if self._tuned is not None:
            is_other = (saved.world_size, saved.recipe) != (size, str(self._recipe))
            self._tuned.load(policy, saved.step, look_soon=is_other)

    def swap(self, recipe: str | Recipe) -> None:
        """Average by another recipe from the next call on; collective.

        The new recipe takes over the residuals of the old one. If it keeps none, they are sent with the next
        tensors of the same names. Raises ValueError if there is no such recipe, or ranks swap to different
        ones; then all go on as before.
        """
        self._require_usable()
        with CollectiveCall(self._group, self._timeout, "Averager.swap") as call:
            chosen = agree_on_recipe(recipe, self._device, call, {"the step": str(self._num_calls)})
        self._engine.swap(chosen, lambda: open_lane(self._group, self._device, call.rendezvous))
        self._recipe = chosen
        self._may_have_state |= keeps_state(chosen)
        self._tuned = self._make_tuner()

    def close(self) -> None:
        """End the averager's threads and connections, and give up what is under way; call on every rank."""
        self._closed_with, self._is_closed = self.failure, True
        self._engine.close()

    def __enter__(self) -> Averager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __str__(self) -> str:
        return repr(self) if self._tuned is None else f"{self!r}\n{self._tuned}"

    def __repr__(self) -> str:
        return f"<Averager {self._recipe} over {self._group.size()} ranks{', closed' * self._is_closed}>"

    def _make_tuner(self) -> Tuned | None:
        """Return a tuner for recipe ``auto``, for which each call is a step; None for other recipes."""
        engine, tuning, group = self._engine, self._recipe.tuning, self._group
        if tuning is None or not isinstance(engine, Engine):
            return None
        return Tuned(tuning, engine, group.rank(), group.size(), self._num_calls)

    def _decide(self) -> None:
        """Let recipe ``auto`` decide from the call before, if it has taken a report in it."""
        if self._tuned is not None:
            self._tuned.decide(self._device)

    def _start(
        self, packing: Packing, named: Mapping[str, Tensor], weight: float | None, place: Place
    ) -> list[Future[Tensor]]:
        shares_names = any(handle.names & packing.names for handle in self._in_flight)
        may_overlap = not (shares_names and self._may_have_state)
        futures = []
        for bucket in packing.buckets(named, weight, may_overlap=may_overlap):
            own_place = replace(place, bucket=bucket.layout.index)
            futures.append(self._engine.start(bucket, own_place))
        return futures

    def _begin_call(self) -> Place:
        self._require_usable()
        self._num_calls += 1
        return Place(self._name, self._num_calls - 1, 0, str(self._recipe))

    @contextlib.contextmanager
    def _failing_all(self, place: Place) -> Iterator[None]:
        """Fail on every rank if the block raises, so that none waits for this one."""
        try:
            yield
        except Exception as error:
            located = locate(error, place)
            self._engine.fail(located)
            self._engine.give_up()
            raise located.with_traceback(error.__traceback__) from None

    def _packing_of(self, named: Mapping[str, Tensor], is_weighted: bool, place: Place) -> Packing:
        """Return the packing of these tensors; on NCCL, compare one that is new with the other ranks'."""
        packing, is_new = self._packings.of(named)
        if is_new and self._is_nccl and self._recipe.exchange.communicates:
            compare(packing.claim(is_weighted=is_weighted), self._engine, place, self._device)
        return packing

    def _checked(self, weight: float | None, named: Mapping[str, Tensor]) -> float | None:
        """Return the weight as Python's own number; raise TypeError or ValueError if it cannot be one."""
        if weight is None:
            return None
        check_weight(weight, self._recipe)
        if self._may_have_state:  # a recipe before this one may have held something back
            self._wait_for_lane()
            require_nothing_owed(self._engine.state.memory, named)
        return float(weight)

    def _require_usable(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"rank {self._name}: this averager is closed; make another")
        if self._engine.failure is not None:
            raise self._engine.failure.with_traceback(None)

    def _wait_for_lane(self) -> None:
        for handle in self._in_flight:
            handle.wait_for_lane()
        self._in_flight.clear()
