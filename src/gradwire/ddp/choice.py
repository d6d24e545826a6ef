"""The choice of what to attach: a recipe, or a hook and its state, checked against the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.hook_info import Hook, hook_info, hook_name
from gradwire.ddp.mixed_precision import supports_events
from gradwire.ddp.models import resolve_for_model
from gradwire.recipes import Recipe, fingerprint, is_factory
from gradwire.recipes import recipe as parse_recipe
from gradwire.torch_private import in_backward_optimizers, uses_python_reducer

_TORCH_HOME = "torch.distributed.algorithms.ddp_comm_hooks."
# Modules of torch with hooks whose state is a process group.
_TORCH_GROUP_HOOKS = {f"{_TORCH_HOME}{name}_hooks" for name in ("default", "quantization")}
# Packages whose hook states may hold a process group.
_STATE_PACKAGES = (_TORCH_HOME, "gradwire.ddp_comm_hooks.")


class _GroupState(Protocol):
    process_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Choice:
    """The recipe, or the hook with its state, that averages a model's gradients."""

    recipe_or_hook: Recipe | Hook
    state: object = None

    @property
    def recipe(self) -> Recipe | None:
        """The recipe; None for a hook."""
        return self.recipe_or_hook if isinstance(self.recipe_or_hook, Recipe) else None

    @property
    def name(self) -> str:
        chosen = self.recipe_or_hook
        return str(chosen) if isinstance(chosen, Recipe) else hook_name(chosen)

    @property
    def communicates(self) -> bool:
        """False for a recipe that leaves gradients as they are, such as that of local SGD's own steps."""
        return self.recipe is None or self.recipe.exchange.communicates

    @property
    def fingerprint(self) -> dict[str, str]:
        """The facts about this choice that must be equal on all ranks."""
        if isinstance(self.recipe_or_hook, Recipe):
            return fingerprint.of_recipe(self.recipe_or_hook)
        return {"hook": hook_name(self.recipe_or_hook)}

    def with_recipe(self, recipe: Recipe) -> Choice:
        return replace(self, recipe_or_hook=recipe)

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Give a hook or state of ours or torch's its model and its process group."""
        state: Any = self.state
        if _has_group(state):
            # Without a group, the hook would average over the world, not over the model's group.
            state.process_group = ddp.process_group
        if _is_known(state) and hasattr(state, "gradwire_bind"):
            state.gradwire_bind(ddp)
        if (prepare := hook_info(self.recipe_or_hook).prepare) is not None:
            prepare(ddp)


def choose(ddp: DistributedDataParallel, recipe: str | Recipe | Hook, state: object) -> Choice:
    """Return what to attach, without changing anything; raise for errors that this rank sees alone."""
    choice = Choice(parse_choice(recipe), state)
    _check_state(ddp, state)
    if choice.recipe is not None:
        choice = choice.with_recipe(resolve_for_model(choice.recipe, ddp))
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise TypeError(f"recipe {choice.name} takes no state; pass state= only with a hook")
    elif state is None and _takes_group(choice.recipe_or_hook):
        # With None, the hook would average over the world, not over the model's group.
        choice = replace(choice, state=ddp.process_group)
    _check_model(ddp, choice)
    return choice


def parse_choice(recipe: str | Recipe | Hook) -> Recipe | Hook:
    """Return the recipe or hook; ValueError or TypeError if there is no such recipe."""
    # Recipe factories and classes are callable too, but they are not hooks.
    if isinstance(recipe, str | Recipe | type) or not callable(recipe) or is_factory(recipe):
        return parse_recipe(recipe)  # type: ignore[arg-type]
    return hook_info(recipe).recipe or recipe


def _check_state(ddp: DistributedDataParallel, state: object) -> None:
    if isinstance(state, dist.ProcessGroup) and state is not ddp.process_group:
        raise ValueError(
            "the state is a process group, but not the model's own; gradients are averaged over the group "
            "that the DistributedDataParallel was made with: leave state out"
        )
    if _has_group(state) and state.process_group not in (None, ddp.process_group):
        raise ValueError(
            f"this {type(state).__name__} has a process group that is not the model's own; make it with "
            "process_group=None"
        )


def _check_model(ddp: DistributedDataParallel, choice: Choice) -> None:
    if uses_python_reducer(ddp):
        raise ValueError(
            "this model uses DDP's Python reducer (torch._dynamo.config.optimize_ddp = "
            "'python_reducer'), which passes hooks no buckets; set optimize_ddp to True or False"
        )
    if hook_info(choice.recipe_or_hook).prepare is None and any(
        in_backward_optimizers(p) is not None for p in ddp.module.parameters()
    ):
        raise ValueError(
            "this model's parameters have optimizers that run in backward, on gradients that are not yet "
            "averaged; leave _apply_optimizer_in_backward out and use gradwire.overlap_optimizer"
        )
    if ddp.mixed_precision is not None and not supports_events():
        raise ValueError(
            "this model was made with mixed_precision=, whose forward pass needs an accelerator's events; "
            "on CPU leave it out and use torch.autocast"
        )


def _has_group(state: Any) -> TypeGuard[_GroupState]:
    """Return True for a state of ours or torch's that has a process group."""
    return _is_known(state) and hasattr(state, "process_group")


def _is_known(state: object) -> bool:
    """Return True if the state's class is ours or torch's, or derived from one of these."""
    return any(kind.__module__.startswith(_STATE_PACKAGES) for kind in type(state).__mro__)


def _takes_group(hook: Any) -> bool:
    """Return True for a hook of ours or torch's whose state is a process group, even if it is wrapped."""
    while (inner := hook.func if isinstance(hook, functools.partial) else hook_info(hook).wraps) is not None:
        hook = inner
    return hook_info(hook).recipe is not None or getattr(hook, "__module__", "") in _TORCH_GROUP_HOOKS
