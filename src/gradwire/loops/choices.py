"""The group, the device and the recipe of an averager, and checks of what the user gave."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.averaging import is_disabled
from gradwire.buckets import Memory
from gradwire.exchanges import LowRank
from gradwire.ops import warm_up
from gradwire.peers import Claim, CollectiveCall, backend_name
from gradwire.recipes import Recipe, agree_on_nodes, fingerprint, kernels_of, require_nodes
from gradwire.recipes import recipe as parse_recipe
from gradwire.torch_private import device_types

# Sums and ratios of weights between these neither overflow nor vanish.
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-100, 1e100


def choose_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, by default the world. Raises RuntimeError if there is none."""
    if group is None and not dist.is_initialized():
        raise RuntimeError(
            "an Averager needs a process group: call torch.distributed.init_process_group first"
        )
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        if chosen == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not in the group: only its members make an Averager")
        shown = repr(chosen) if isinstance(chosen, str | int) else type(chosen).__name__
        raise TypeError(f"group is a process group, not {shown}; write Averager(recipe, group)")
    return chosen


def choose_device(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    """Return the device; by default CUDA if the group has NCCL there, otherwise CPU."""
    if device is not None:
        chosen = torch.device(device)
        if chosen.type not in ("cpu", "cuda"):
            raise ValueError(f"gradwire averages tensors on cpu and cuda, not on {chosen.type}")
        return chosen
    cuda = torch.device("cuda")
    has_cuda = torch.cuda.is_available() and cuda in device_types(group)
    return cuda if has_cuda and backend_name(group, cuda) == "nccl" else torch.device("cpu")


def agree_on_recipe(recipe: str | Recipe, device: torch.device, call: CollectiveCall, claim: Claim) -> Recipe:
    """Agree on a recipe and on ``claim`` with every rank, and return the recipe for these ranks.

    Raises ValueError if there is no such recipe, ranks cannot be divided into its nodes, or ranks differ.
    """
    chosen = parse_recipe(recipe)
    require_nodes(chosen, call.group.size())
    if not is_disabled():
        warm_up(device, kernels_of(chosen, call.group))
    facts = {"device": device.type, **fingerprint.of_version(), **fingerprint.of_recipe(chosen)}
    return agree_on_nodes(chosen, call, {**claim, **facts})


def keeps_state(recipe: Recipe) -> bool:
    """Return True if the recipe keeps residuals or factors from call to call."""
    return any(_has_feedback(each) or isinstance(each.exchange, LowRank) for each in recipe.leaves())


def require_nothing_owed(memory: Memory, names: Collection[str]) -> None:
    """Raise ValueError if an earlier recipe has held back a part of one of these tensors."""
    if owed := memory.named().get("residual", {}).keys() & set(names):
        raise ValueError(
            f"an earlier recipe has held back a part of {sorted(owed)[:5]}, which has no weight: average "
            "them once without one"
        )


def check_weight(weight: object, recipe: Recipe) -> None:
    """Raise TypeError or ValueError if this is no weight, or if the recipe cannot take a weighted mean."""
    if isinstance(weight, Tensor):
        raise TypeError("weight is a number, not a tensor: give its .item()")
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"weight is a number, not {weight!r}")
    if not (weight == 0 or _LEAST_WEIGHT <= float(weight) <= _MOST_WEIGHT):
        raise ValueError(f"weight must be 0, or from {_LEAST_WEIGHT:g} to {_MOST_WEIGHT:g}, not {weight}")
    for each in recipe.leaves():
        why = ""
        if not each.exchange.communicates:
            why = "it averages nothing"
        elif each.reduction == "sum":
            why = "it takes sums; multiply the tensors yourself"
        elif _has_feedback(each):
            why = (
                "its feedback adds what one call leaves out to the next call, whose weights may differ; "
                "use a recipe without feedback"
            )
        if why:
            raise ValueError(f"recipe {each} cannot take weights: {why}")


def _has_feedback(recipe: Recipe) -> bool:
    tuning = recipe.tuning
    exchanges = [recipe.exchange] if tuning is None else [exchange for _, exchange in tuning.encodings]
    return any(getattr(each, "feedback", None) not in (None, False) for each in exchanges)
