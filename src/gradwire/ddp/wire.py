"""The handle to what is attached to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.averaging import RecipeRunner, Runner, checkpoint
from gradwire.buckets import BucketLayout, Layouts
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_slot import HookSlot
from gradwire.ddp.models import claim_of, device_of, in_buckets, resolve_for_model, trained
from gradwire.ddp.user_hooks import hook_name
from gradwire.errors import WireError
from gradwire.lanes import open_lane
from gradwire.ops import warm_up
from gradwire.peers import agree, join_rendezvous
from gradwire.recipes import Recipe, WirePlan, agree_on_nodes, kernels_of, make_plan, require_averaging
from gradwire.recipes import recipe as parse_recipe
from gradwire.telemetry import WireStats

Hook = Callable[..., Any]


class Wire:
    """What is attached to a model: look at it with `stats`, end it with `detach`."""

    def __init__(
        self,
        slot: HookSlot,
        bridge: Bridge | None,
        recipe: Recipe | Hook,
        layouts: Layouts,
        timeout: timedelta,
    ) -> None:
        self._slot = slot
        self._bridge = bridge
        self._layouts = layouts
        self._timeout = timeout
        self._first_step = 0  # such that the difference to the bridge's count is of this wire alone
        # The runner that has a memory, also when another is put around it.
        runner = None if bridge is None else bridge.runner
        self._recipe_runner = runner if isinstance(runner, RecipeRunner) else None
        self.recipe = recipe
        """The recipe, or the user's hook."""

    def stats(self) -> WireStats:
        """Bytes sent, messages, time waiting and working: in total, per step and per bucket."""
        if self._bridge is None:
            return WireStats(0, None, None, None, None, ())
        stats = self._bridge.runner.stats.read(self._bridge.num_steps - self._first_step)
        policy, recorder = self._bridge.policy, self._bridge.recorder
        return replace(
            stats,
            num_skipped=0 if policy is None else policy.num_skipped,
            parameters=() if recorder is None else recorder.parameters,
        )

    @property
    def looks_at_gradients(self) -> bool:
        """Whether gradients that are not finite are skipped or raised for."""
        return self._bridge is not None and self._bridge.policy is not None

    def plan(self, step: int | None = None) -> WirePlan:
        """What each step sends: which parameters by which recipe, and how many bytes; ``print`` it.

        Of a recipe that changes by step, what ``step`` sends; by default one of the stage that sends most.
        Exact for the buckets of the last step, but where buckets share messages, on NCCL: what fills the gaps
        between them is up to 63 bytes for each bucket and message. Before the first step, DDP's buckets are
        not known, and the figures are those of one bucket for each dtype, off by a few bytes for each more.
        Sparse gradients, which travel as they are, are counted as if they were dense. Raises TypeError
        for a hook, since what it sends cannot be known.
        """
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"what the hook {self._name} sends cannot be known")
        layouts = self._layouts.current() or self._layouts.guess(list(trained(self.model).values()))
        return make_plan(self.recipe, layouts, self._group.rank(), self._group.size(), step)

    def layout(self) -> tuple[BucketLayout, ...]:
        """Which parameter lies where in each of the buckets seen so far."""
        return self._layouts.current()

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on bit for bit: its residuals, the step count, the layout in use.

        Plain tensors (copies) and numbers, in a form that ``torch.save`` and
        ``torch.distributed.checkpoint.save`` take; each rank saves its own. Call it between steps.
        """
        group, runner = self._group, self._recipe_runner
        step = 0 if self._bridge is None else self._bridge.num_steps
        timeline = [] if runner is None else runner.timeline.save(step)
        memory = {} if runner is None else runner.memory.state_dict()
        held = None if runner is None or runner.loss_scale is None else runner.loss_scale.held
        loss_scale = None if held is None else float(held)
        return checkpoint.write(self._name, step, timeline, memory, group.rank(), group.size(), loss_scale)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, also on another number of ranks; collective.

        Args:
            state: this rank's own, or, if the number of ranks has changed, those of all ranks as
                `merge_state_dicts` or `checkpoint_template` gives them.

        On the same number of ranks, the steps that follow are bit for bit those of a run that was not
        stopped. On another one, what the ranks hold back together stays the same. Residuals that the
        recipe of this wire has no use for are sent with the next gradients.

        Raises ValueError, on every rank, when an entry is missing, unknown or of another shape; RuntimeError
        after `detach`.

        Example::

            torch.save(wire.state_dict(), f"wire{rank}.pt")
            ...
            wire.load_state_dict(torch.load(f"wire{rank}.pt"))
        """
        self._require_attached("load_state_dict")
        group, runner = self._group, self._recipe_runner
        caller = "Wire.load_state_dict"
        meeting = join_rendezvous(group, self._timeout, caller)
        try:
            reduction = self.recipe.reduction if isinstance(self.recipe, Recipe) else "mean"
            seen = {slot.name for layout in self._layouts.current() for slot in layout.slots}
            may_be = {n: p for n, p in in_buckets(self.model).items() if not seen or n in seen}
            must_be = seen or trained(self.model).keys()
            saved = checkpoint.read(state, may_be, must_be, group.rank(), group.size(), reduction)
        except Exception as error:
            agree(group, meeting, error, self._timeout, caller)
            raise
        claim = {"the saved step": str(saved.step), "the saved layout": str(saved.timeline)}
        claim["the saved loss scale"] = str(saved.loss_scale)
        agree(group, meeting, {**claim, **claim_of(self.model, self.recipe)}, self._timeout, caller)
        if self._bridge is None:
            return
        self._first_step += saved.step - self._bridge.num_steps
        self._bridge.num_steps = saved.step
        if runner is not None:
            runner.memory.load_state_dict(saved.memory, device_of(self.model))
            runner.timeline.load(saved.step, saved.timeline)
            if runner.loss_scale is not None:
                runner.loss_scale.held = saved.loss_scale
            elif saved.loss_scale is not None:  # from here on, losses are not scaled
                runner.memory.rescale("residual", torch.tensor(1 / saved.loss_scale, dtype=torch.float64))
        self._tell("load", saved_by=saved.recipe)

    def swap(self, recipe: str | Recipe) -> None:
        """Average by another recipe from the next step on; collective, between steps.

        What the recipe so far has held back is taken over by the new one, or, if that keeps no
        residuals, sent with its next gradients: nothing is lost.

        Raises ValueError when there is no such recipe or ranks swap to different ones or at different
        steps; then all go on as before. TypeError for a wire that runs a hook, RuntimeError after `detach`.

        Example::

            wire = gradwire.attach(model, "bf16")
            ...
            wire.swap("int4")
        """
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"this wire runs a hook, {self._name}; detach it, and attach the recipe")
        self._require_attached("swap")
        group, caller = self._group, "Wire.swap"
        meeting = join_rendezvous(group, self._timeout, caller)
        try:
            chosen = resolve_for_model(parse_recipe(recipe), self.model)
            if self._bridge is not None and (self._bridge.policy or self._bridge.verification):
                require_averaging(chosen, "on_nonfinite= and verify_every= do not work with it")
            warm_up(device_of(self.model), kernels_of(chosen, group))
        except Exception as error:
            agree(group, meeting, error, self._timeout, caller)
            raise
        step = 0 if self._bridge is None else self._bridge.num_steps
        claim = {"the step": str(step), **claim_of(self.model, chosen)}
        chosen = agree_on_nodes(chosen, group, meeting, claim, self._timeout, caller)
        if self._recipe_runner is not None:
            self._recipe_runner.swap(chosen, lambda: open_lane(group, device_of(self.model), meeting))
        self._tell("swap", recipe=str(chosen), before=self._name)
        self.recipe = chosen

    def checkpoint_template(self, metadata: Any, key: str = "wire") -> dict[str, Any]:
        """What ``torch.distributed.checkpoint.load`` fills with the state saved under ``key``.

        Args:
            metadata: what ``FileSystemReader(path).read_metadata()`` returns.
            key: under which key of the checkpoint the state was saved.

        Raises ValueError when there is none.

        Example::

            dcp.save({"wire": wire.state_dict()}, checkpoint_id=path)
            ...
            saved = {"wire": wire.checkpoint_template(dcp.FileSystemReader(path).read_metadata())}
            dcp.load(saved, checkpoint_id=path)
            wire.load_state_dict(saved["wire"])
        """
        group = self._group
        return checkpoint.template(metadata.state_dict_metadata, key, group.rank(), group.size())

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.model.process_group

    @property
    def _name(self) -> str:
        return str(self.recipe) if isinstance(self.recipe, Recipe) else hook_name(self.recipe)

    @property
    def model(self) -> DistributedDataParallel:
        """The model whose gradients this wire averages."""
        return self._slot.model

    def wrap_runner(self, wrap: Callable[[Runner], Runner]) -> None:
        """Put a runner around the one that averages; for rooms of gradwire's own."""
        assert self._bridge is not None
        self._bridge.runner = wrap(self._bridge.runner)

    @property
    def attached(self) -> bool:
        """Whether this wire still averages its model's gradients."""
        return self._bridge is not None and self._slot.bridge is self._bridge

    def detach(self) -> None:
        """Return the model to plain averaging, and end the lane.

        DDP takes one hook in its life, so ours stays registered and averages as DDP does without a hook.
        `attach` works again afterwards. Call it on every rank, between steps.
        """
        if self._bridge is not None:
            self._slot.leave(self._bridge)
            self._bridge.runner.close()
            self._tell("detach")
            if self._bridge.recorder is not None:
                self._bridge.recorder.close()

    def _require_attached(self, what: str) -> None:
        if self._bridge is not None and not self.attached:
            raise RuntimeError(
                f"rank {self._group.rank()}: this wire is detached, and {what} would have no effect; "
                "call it on the wire that gradwire.attach returned last"
            )

    def _tell(self, event: str, **details: str) -> None:
        if self._bridge is not None and self._bridge.recorder is not None:
            self._bridge.recorder.tell(event, self._bridge.num_steps, **details)

    @property
    def failure(self) -> WireError | None:
        """The first error of any rank, if there was one."""
        return None if self._bridge is None else self._bridge.runner.failure

    def is_on(self, model: DistributedDataParallel) -> bool:
        """Whether this is the model's wire."""
        return self._slot.is_of(model)

    def give_way(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` and detach when somebody else attaches to the model, instead of refusing that."""

        def leave() -> None:
            self._slot.give_way = None
            if self.attached:
                tell()
                self.detach()

        self._slot.give_way = leave

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"<Wire {self._name}, {'attached' if self.attached else 'detached'}>"
