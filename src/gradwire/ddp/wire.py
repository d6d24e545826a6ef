"""The handle that `attach` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from gradwire.averaging import checkpoint
from gradwire.buckets import BucketLayout
from gradwire.ddp.attachment import Attachment
from gradwire.ddp.ddp_attachment import DDPAttachment
from gradwire.ddp.hook_info import Hook
from gradwire.errors import WireError
from gradwire.lanes import Uncopied, open_lane
from gradwire.ops import warm_up
from gradwire.recipes import Recipe, WirePlan, agree_on_nodes, kernels_of, require_averaging
from gradwire.recipes import recipe as parse_recipe
from gradwire.telemetry import WireStats
from gradwire.tuning import Decision


class Wire(Uncopied):
    """The attachment of a recipe or hook to a model: read it with `stats`, end it with `detach`.

    >>> wire = gradwire.attach(model, "int8")
    >>> wire.swap("int4")
    >>> wire.recipe.name, wire.attached
    ('int4', True)
    >>> wire.detach()
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._first_step = 0  # the bridge counts all steps of the run, this wire only its own

    @property
    def recipe(self) -> Recipe | Hook:
        """The recipe, or the user's hook."""
        return self._attachment.choice.recipe_or_hook

    @property
    def model(self) -> nn.Module:
        """The model whose gradients this wire averages."""
        return self._attachment.model

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that exchange by the recipe."""
        return self._attachment.group

    @property
    def attached(self) -> bool:
        """True while this wire averages its model's gradients."""
        return self._attachment.is_attached

    @property
    def failure(self) -> WireError | None:
        """The first error of any rank, if there was one; also after `detach`."""
        return self._attachment.first_failure

    def stats(self) -> WireStats:
        """Return bytes, messages, and times of waiting and working: in total, per step and per bucket."""
        bridge = self._attachment.bridge
        if self._attachment.is_disabled:
            return WireStats(0, None, None, None, None, ())
        return replace(
            bridge.runner.stats.read(bridge.num_steps - self._first_step),
            num_skipped=bridge.checks.num_skipped,
            parameters=bridge.checks.parameters,
        )

    def plan(self, step: int | None = None) -> WirePlan:
        """Return what a step sends: each parameter's recipe and bytes; ``print`` it.

        For a recipe that changes by step, this is the plan of ``step``, by default a step of the stage that
        sends most. The figures are exact for the buckets of the last step, with two exceptions. Buckets that
        share messages, on NCCL, add up to 63 bytes per bucket and message. Sparse gradients are counted as
        if they were dense. Before the first step DDP's buckets are not known: the figures are those of one
        bucket per dtype, and off by a few bytes for each further bucket.

        Raises TypeError for a hook, whose messages cannot be known.
        """
        recipe = self._attachment.current_recipe
        if recipe is None:
            raise TypeError(
                f"the hook {self._attachment.choice.name} has no plan, since what it sends cannot be known; "
                "attach a recipe"
            )
        plan = self._attachment.plan(recipe, step)
        if not self._attachment.is_disabled:
            return plan
        return replace(
            plan, note="GRADWIRE_DISABLE is set: DDP averages by itself, and nothing of this is sent"
        )

    def decisions(self) -> tuple[Decision, ...]:
        """Return the decisions of recipe ``auto`` so far, the same on every rank; ``print(wire)`` shows them.

        Empty for other recipes.
        """
        tuned = self._attachment.tuned
        return () if tuned is None else tuned.decisions

    def layout(self) -> tuple[BucketLayout, ...]:
        """Return the layouts of the buckets seen so far."""
        return self._attachment.seen_layouts()

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return what this rank needs to resume bit for bit: residuals, the step count, the layouts in use.

        Args:
            gather: return the states of all ranks on every rank, as `merge_state_dicts` makes them; for
                programs that save on rank 0 alone. Collective.

        The state is plain tensors (copies) and numbers, which ``torch.save`` and
        ``torch.distributed.checkpoint.save`` take. Without ``gather``, each rank saves its own. Call it
        between steps; RuntimeError inside ``backward()``. It works without the model too.

        Example::

            state = wire.state_dict(gather=True)  # on every rank
            if rank == 0:
                torch.save(state, "wire.pt")
        """
        return self._attachment.save(gather=gather)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, also on another number of ranks; collective.

        Args:
            state: this rank's state. If the number of ranks has changed, the state of all ranks, from
                `merge_state_dicts` or `checkpoint_template`.

        On the same number of ranks, the steps that follow are bit for bit those of a run that was not
        stopped. On another number, the ranks together hold back as much as before. Residuals that the
        recipe of this wire does not keep are sent with the next gradients.

        Raises ValueError, on every rank, when an entry is missing, unknown or of another shape; RuntimeError
        after `detach`.

        Example::

            torch.save(wire.state_dict(), f"wire{rank}.pt")
            ...
            wire.load_state_dict(torch.load(f"wire{rank}.pt"))
        """
        own = self._attachment
        with own.call("Wire.load_state_dict") as call:
            saved = own.read(state)
            claim = {"the saved step": str(saved.step), "the saved layout": str(saved.timeline)}
            claim["the saved loss scale"] = str(saved.loss_scale)
            policy = None if own.tuned is None else own.tuned.read(saved)
            claim["the saved tuning"] = saved.tuning or "none"
            call.agree({**claim, **own.claim(own.choice.fingerprint)})
        if own.is_disabled:
            return
        self._first_step += saved.step - own.bridge.num_steps
        own.bridge.num_steps = saved.step
        if own.engine is not None:
            own.engine.state.load(saved, own.device)
        if own.tuned is not None:
            is_other = (saved.world_size, saved.recipe) != (own.world_size, own.choice.name)
            own.tuned.load(policy, saved.step, look_soon=is_other)
        own.record_event("load", saved_by=saved.recipe)

    def checkpoint_template(self, metadata: Any, key: str = "wire") -> dict[str, Any]:
        """Return a state that ``torch.distributed.checkpoint.load`` fills with the one saved under ``key``.

        Args:
            metadata: the result of ``FileSystemReader(path).read_metadata()``.
            key: the key of the checkpoint under which the state was saved.

        Raises ValueError if there is no state under ``key``.

        Example::

            dcp.save({"wire": wire.state_dict()}, checkpoint_id=path)
            ...
            saved = {"wire": wire.checkpoint_template(dcp.FileSystemReader(path).read_metadata())}
            dcp.load(saved, checkpoint_id=path)
            wire.load_state_dict(saved["wire"])
        """
        own = self._attachment
        return checkpoint.template(metadata.state_dict_metadata, key, own.rank, own.grid)

    def swap(self, recipe: str | Recipe) -> None:
        """Average by another recipe from the next step on; collective, between steps.

        The new recipe takes over the residuals of the old one. If it keeps no residuals, they are sent with
        its next gradients. Nothing is lost.

        Raises ValueError when there is no such recipe, or ranks swap to different ones or at different
        steps; then all go on as before. TypeError for a wire that runs a hook, RuntimeError after `detach`.

        Example::

            wire = gradwire.attach(model, "bf16")
            ...
            wire.swap("int4")
        """
        own = self._attachment
        if own.choice.recipe is None:
            raise TypeError(f"this wire runs a hook, {own.choice.name}; detach it, and attach the recipe")
        with own.call("Wire.swap") as call:
            chosen = own.resolve(parse_recipe(recipe))
            if own.bridge.checks.policy or own.bridge.checks.verification:
                require_averaging(chosen, "on_nonfinite= and verify_every= do not work with it")
            warm_up(own.device, kernels_of(chosen, own.group))
            choice = own.choice.with_recipe(chosen)
            claim = {"the step": str(own.bridge.num_steps), **own.claim(choice.fingerprint)}
            chosen = agree_on_nodes(chosen, call, claim)
        if own.engine is not None and not own.is_disabled:
            group, device = own.group, own.device
            own.engine.swap(chosen, lambda: open_lane(group, device, call.rendezvous, in_steps=True))
        own.record_event("swap", recipe=str(chosen), before=own.choice.name)
        own.choice = own.choice.with_recipe(chosen)
        own.use_tuner_of(chosen)

    def detach(self) -> None:
        """Return the model to plain averaging, and end the lane.

        DDP takes one hook per model, for good. So ours stays registered, and averages as DDP does without a
        hook. You can `attach` again afterwards. Call it on every rank, between steps.
        """
        self._attachment.detach()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __str__(self) -> str:
        tuned = self._attachment.tuned
        return repr(self) if tuned is None else f"{self!r}\n{tuned}"

    def __repr__(self) -> str:
        return f"<Wire {self._attachment.choice.name}, {'attached' if self.attached else 'detached'}>"


def attachment_of(wire: Wire) -> Attachment:
    """Return the parts behind a wire on any model; internal to gradwire."""
    return wire._attachment


def ddp_attachment_of(wire: Wire) -> DDPAttachment:
    """Return the attachment behind a wire on a DDP model; internal to gradwire."""
    assert isinstance(wire._attachment, DDPAttachment), "this wire is not on a DDP model"
    return wire._attachment
