"""Local SGD: ranks train alone, and average their parameters every few steps."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.averaging import RunState, Timeline, checkpoint, gather_states
from gradwire.lanes import Uncopied
from gradwire.recipes import Recipe, fingerprint
from gradwire.sharded import whole_tensor
from gradwire.telemetry import WireStats
from gradwire.training.fragments import load_tensors, make_fragments, share_starts, tensors_of
from gradwire.training.inner_optimizer import InnerOptimizer
from gradwire.training.local_choices import LocalOptions, check_work
from gradwire.training.local_state import Turn, read_own_residuals, read_parts, require_keys
from gradwire.training.membership import join
from gradwire.training.newest_state import Newest, Position, newest
from gradwire.training.outer import Outer
from gradwire.training.outer_loop import OuterLoop
from gradwire.training.sites import Site, find_site
from gradwire.training.state_sharing import share_state


class LocalSGD(Uncopied):
    """Average gradients for ``warmup_steps`` steps; from then on average parameters every ``period`` steps.

    Ranks send how far their parameters have moved since the last averaging. So low-precision recipes encode
    small numbers, and an outer optimizer can use the mean as a gradient. After each averaging all ranks have
    the same parameters, bit for bit, unless a `DiLoCo` streams.

    Args:
        model: a ``DistributedDataParallel``, a model that ``fully_shard`` has sharded over the ranks of each
            site, a plain model with ``sites``, or ``torch.compile`` of one of these; with its weights loaded.
        optimizer: the local optimizer; those of its parameters that belong to the model are averaged.
        period: the number of steps between averagings; or their time, as a ``timedelta``, and then each rank
            takes as many steps as it can.
        warmup_steps: the number of first steps that average gradients, as without local SGD.
        recipe: the recipe for parameters; by default ``"int4"`` with a `DiLoCo`, and ``"fp32"`` without.
        gradient_recipe: the recipe for gradients during warm-up; by default ``recipe``.
        outer: the outer optimizer, `SlowMo` or `DiLoCo`; None to continue from the mean.
        sites: the ranks to average with: a process group, or a ``DeviceMesh`` of one dimension. For a sharded
            model, they are those that hold the same shard, one of each site; a model that was sharded over a
            mesh of two dimensions knows them. A ``DistributedDataParallel`` has its own group.
        weigh: True to weigh each rank in the mean by the ``work`` that it gave to `step`.
        offload: True to keep the last average and the momentum of a CUDA model in host memory.
        timeout: how long to wait for the other ranks when recipes change; by default the group's timeout.

    Raises ValueError or TypeError for arguments that do not fit, or that differ between ranks.

    The constructor is collective, and so is every method except `state_dict` and `stats`. Call `step` after
    each step of the optimizer, also after one that a ``GradScaler`` has skipped.

    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> local = gradwire.LocalSGD(model, optimizer, period=16, recipe="bf16", outer=gradwire.DiLoCo())
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     model(inputs).square().mean().backward()
    ...     optimizer.step()
    ...     has_averaged = local.step()
    >>> local.average()  # whatever the period has left over
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        period: int | timedelta,
        warmup_steps: int = 0,
        recipe: str | Recipe | None = None,
        gradient_recipe: str | Recipe | None = None,
        outer: Outer | None = None,
        sites: object = None,
        weigh: bool = False,
        offload: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        site = find_site(model, sites)
        self._options = LocalOptions(
            period, warmup_steps, recipe, gradient_recipe, outer, weigh, offload, timeout
        )
        self.period, self.warmup_steps, self.outer = period, warmup_steps, outer
        self._inner = InnerOptimizer(site.module, optimizer)
        self._num_steps = 0
        self._loop: OuterLoop | None = None  # None during warm-up
        self._state = RunState(timeline=Timeline(None))
        self._join(site)

    @property
    def recipe(self) -> Recipe:
        """The recipe for parameters."""
        return self._membership.recipe

    @property
    def num_steps(self) -> int:
        """The number of steps so far."""
        return self._num_steps

    @property
    def num_averages(self) -> int:
        """The number of averagings so far, of fragments or of the whole model; the same on all ranks."""
        return 0 if self._loop is None else self._loop.num_averages

    @property
    def is_local(self) -> bool:
        """True if the warm-up is over, so that gradients are not averaged any more."""
        return self._num_steps >= self.warmup_steps

    def __repr__(self) -> str:
        return f"<LocalSGD {self.recipe}, period {self.period}, {self.num_steps} steps>"

    def step(self, work: float = 1.0) -> bool:
        """Count a step; begin and end the averagings that are due; return True if one has ended.

        Args:
            work: how much this step has done, such as its number of samples; 0 if a ``GradScaler`` has
                skipped it. A LocalSGD with ``weigh`` uses it.

        Raises `WireError` if the averaging fails on any rank. Parameters are then as they were. Raises
        ValueError, and counts no step, if ``work`` is negative, infinite or NaN.
        """
        work = check_work(work)
        self._num_steps += 1
        num_local = self._num_steps - self.warmup_steps
        self._membership.site.prepare()
        if num_local == 0:
            self._begin()
        if num_local <= 0 or self._loop is None:
            return False
        self._loop.begin_due(num_local, work, self._common_step)
        return self._loop.end_due()

    def average(self) -> None:
        """Average all parameters now, in the middle of a period: before an evaluation, or at the end.

        Averagings under way end first. All ranks then have the same parameters. A `DiLoCo` that streams takes
        no outer step here: parameters become the plain mean. During warm-up this does nothing.
        """
        if self._loop is None:
            return
        site = self._membership.site
        site.prepare()
        self._loop.catch_up(site.group, site.device)
        self._loop.begin_all()
        self._loop.end_all()

    def stats(self) -> WireStats:
        """Return bytes, messages and times of the averagings, each of which counts as a step."""
        return self._membership.engine.stats.read(self.num_averages)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the step count, the parameters at the start of the period, the momentum and the residuals.

        The state is copies of tensors, and numbers. It also has the means of averagings under way, for which
        it waits. Residuals differ between ranks and have the rank in their key, so each rank saves its own
        state. With ``gather``, which is collective, every rank gets those of all ranks, and one rank can save
        them. Between two averagings the model's parameters differ between ranks too: call `average` first,
        or save every rank's.
        """
        membership, site = self._membership, self._membership.site
        turn, tensors = (Turn(), tensors_of([])) if self._loop is None else self._loop.save()
        has_failed = self._loop is not None and self._loop.has_failed  # see `regroup`
        memory = {} if has_failed else self._state.memory.state_dict()
        averaging = checkpoint.write(str(self.recipe), self._common_step, (), memory, site.rank, site.grid)
        if gather:
            for group in site.state_groups:
                averaging = gather_states(averaging, group, membership.timeout, "LocalSGD.state_dict")
            tensors = {kind: {n: whole_tensor(t) for n, t in own.items()} for kind, own in tensors.items()}
        # With a period in seconds ranks are at different steps; a wire that averages nothing keeps nothing.
        gather = gather and not (self._options.is_timed and self.is_local)
        wire = membership.gradients.save(self._num_steps, gather=gather)
        own = {"num_steps": self._num_steps, "turn": turn.save(), "averaging": averaging, "wire": wire}
        return {**own, **tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; load the model's parameters separately.

        On another number of ranks, the residuals of all saved ranks are needed. Then ``state["averaging"]``
        and ``state["wire"]`` must each be `merge_state_dicts` of every rank's. A recipe without feedback has
        no residuals, and any rank's state will do.

        Raises ValueError, and loads nothing on any rank, if the state is not that of a LocalSGD, belongs to
        other parameters, lacks the residuals of a rank, or has another step than the other ranks'.
        """
        membership, site = self._membership, self._membership.site
        with membership.call("load_state_dict") as call:
            num_steps, loop = self._read(state)
            memory, of_wire = read_parts(state, site)
            turn = _turn_of(loop)
            claim = turn.claim()
            steps_differ = self._options.is_timed and loop is not None
            if not steps_differ:
                claim["the saved step"] = str(num_steps)
                claim["averagings under way"] = str(turn.under_way)
                claim["the wire's saved layout"] = str(of_wire.timeline)
                claim["the wire's saved step"] = str(of_wire.step)
            call.agree({**claim, **site.claim(fingerprint.of_recipe(self.recipe))})
        self._wait_for_averagings()
        membership.gradients.use_for(num_steps)
        if not steps_differ:
            membership.gradients.load(state["wire"])
        self._state.memory.load_state_dict(memory, site.device)
        self._num_steps, self._loop = num_steps, loop

    def resume(self, state: dict[str, Any] | None) -> bool:
        """Go on with the ranks that have come together, after some were lost or have joined; collective.

        Ranks whose state is the newest go on with it. The others, which have an older state or None, take
        the last average, the outer momentum and the step count from one of those, and drop their own.

        Args:
            state: this rank's own `state_dict`, saved with any number of ranks; None if it has none. Load
                the model's parameters and the optimizer before, if there are any.

        Returns True if this rank has taken its parameters from another.

        Raises ValueError, and changes nothing on any rank, if a state does not fit.

        Example::

            saved = torch.load(path) if path.exists() else None
            if saved is not None:
                model.module.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            local.resume(saved and saved["local"])
        """
        membership, site = self._membership, self._membership.site
        with membership.call("resume") as call:
            note, loop = "", None
            memory: checkpoint.States = {}
            if state is not None:
                num_steps, loop = self._read(state)
                memory = read_own_residuals(state, site)
                note = Position(num_steps, _turn_of(loop)).note()
            claim = site.claim(fingerprint.of_recipe(self.recipe))
            found = newest(call.agree(claim, note), site.group.rank(), self.warmup_steps)
        if found is None or membership.is_disabled:
            return False
        self._wait_for_averagings()
        membership.gradients.go_on_at(found.position.num_steps)
        self._state.memory.load_state_dict(memory, site.device)
        self._go_on(found, loop)
        return not found.is_current

    def regroup(self, sites: object) -> bool:
        """Go on with other sites, after some were lost or have joined; collective over the new group.

        A site that is new makes a `LocalSGD` over the new group instead, at the same time. Sites with the
        newest average go on, each with its own steps since. The others take the last average, the outer
        momentum and the step count from one of those. An averaging under way with lost sites is given up:
        steps that it would have averaged are in the next one.

        Args:
            sites: the ranks to average with from now on, as for `LocalSGD`; a group that is new.

        Returns True if this site has taken its parameters from another.

        Raises TypeError for a ``DistributedDataParallel``, which keeps its group. Raises RuntimeError if a
        rank does not come in time: call this again with another group.

        Example::

            try:
                local.step()
            except gradwire.WireError:
                local.regroup(next_group())  # of the members that are left
        """
        site = self._membership.site.regrouped(sites)
        if self._loop is not None and self._loop.settle():
            # Residuals may hold the steps of the averaging that failed, which the next one has too.
            self._state = RunState(timeline=Timeline(None))
        self.detach()
        return self._join(site)

    def detach(self) -> None:
        """Return the model to plain averaging of gradients, and end the lane; call it on every rank.

        Averagings under way are given up: call `average` first to end them.
        """
        self._membership.close()

    def __enter__(self) -> LocalSGD:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def _join(self, site: Site) -> bool:
        """Meet the ranks of all sites, and go on from the newest state of them; collective.

        Returns True if this site has taken its parameters from another.
        """
        own = Position(self._num_steps, _turn_of(self._loop))
        self._membership, found = join(site, self._options, self._inner, own, self._state)
        try:
            if found is not None and not self._membership.is_disabled:
                self._go_on(found, self._loop)
            elif found is None and self.is_local:
                self._begin()
        except BaseException:
            self._membership.close()
            raise
        return found is not None and not found.is_current

    def _go_on(self, found: Newest, loop: OuterLoop | None) -> None:
        """Go on from the newest state: with ``loop`` if it has that, or with another site's; collective."""
        site = self._membership.site
        if not found.is_current:
            self._state.memory.load_state_dict({}, site.device)
            loop = self._make_loop() if found.position.num_steps >= self.warmup_steps else None
        if loop is not None:
            loop.members = self._membership.members
            loop.go_on(replace(found.position.turn, work=loop.turn.work))
        if not found.is_everywhere or found.position.turn.num_given_up:
            self._state.memory.keep_gradient_states()  # low-rank factors must be the same on all ranks
        if not found.is_everywhere:
            share_state(site, loop, found)
        self._num_steps, self._loop = found.position.num_steps, loop

    @property
    def _common_step(self) -> int:
        """The step at which all ranks are; with a period in seconds, the number of averagings begun."""
        return self._num_steps if self._loop is None or not self._options.is_timed else self._loop.num_begun

    def _wait_for_averagings(self) -> None:
        """Wait for the averagings under way, and for those that other ranks have begun."""
        if self._loop is not None:
            self._loop.catch_up(self._membership.site.group, self._membership.site.device)
            self._loop.wait()

    def _begin(self) -> None:
        """End the warm-up: from here on, ranks train alone."""
        site = self._membership.site
        self._membership.gradients.use_for(self._num_steps)
        if self._membership.is_disabled:
            return
        self._loop = self._make_loop()
        self._loop.note_group()
        # All ranks must start from the same parameters; averaging keeps them the same from here on.
        share_starts(self._loop.fragments, site.group, site.device)

    def _make_loop(self) -> OuterLoop:
        """Return an outer loop that begins with the parameters as they are."""
        options, inner, site = self._options, self._inner, self._membership.site
        site.prepare()
        fragments = make_fragments(inner.parameters(), site.layouts, options.outer, options.offload)
        members, turns = self._membership.members, options.make_turns()
        return OuterLoop(members, fragments, turns, options.streaming, inner, options.weigh)

    def _read(self, state: dict[str, Any]) -> tuple[int, OuterLoop | None]:
        """Return the step and the outer loop of a state; ValueError or TypeError if it does not fit."""
        num_steps = require_keys(state)
        turn = Turn.read(state["turn"]) if "turn" in state else Turn()
        is_local = num_steps >= self.warmup_steps and not self._membership.is_disabled
        loop = self._make_loop() if is_local else None
        if loop is not None:
            loop.go_on(turn)
        load_tensors([] if loop is None else loop.fragments, {"mean": {}, "begun": {}, **state})
        return num_steps, loop


def _turn_of(loop: OuterLoop | None) -> Turn:
    """Return the place of a run between its averagings; that of its beginning during warm-up."""
    return Turn() if loop is None else loop.turn
