"""Facts about a DDP model: its parameters, its buckets, and what must be equal on all ranks."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.buckets import canonical_name
from gradwire.recipes import Recipe, fingerprint, resolve_for_module
from gradwire.torch_private import ddp_facts, is_joining, uncompiled


def make_ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Return ``DistributedDataParallel(module, **options)``, for packages that must not import DDP."""
    return DistributedDataParallel(module, **options)


def is_ddp(model: nn.Module) -> bool:
    """Return True if ``model`` is a ``DistributedDataParallel``."""
    return isinstance(model, DistributedDataParallel)


def unwrap(model: nn.Module) -> DistributedDataParallel:
    """Return the ``DistributedDataParallel`` in ``model``, compiled or not; TypeError if there is none."""
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        return inner
    raise TypeError(f"gradwire takes a DistributedDataParallel, not {type(inner).__name__}{_hint(inner)}")


def _hint(model: object) -> str:
    """Return the end of an error's text that says what to attach to instead, or an empty text."""
    if isinstance(getattr(model, "module", None), DistributedDataParallel):
        return "; its .module is one: attach to that"
    if not isinstance(model, nn.Module):
        return ""
    wrappers = filter(None, map(_wrapper_name, type(model).__mro__))
    if (what := next(wrappers, None)) is not None:
        averaged = f": this model's gradients are averaged by {what}, which"
        if what == _FSDP2:
            return f"{averaged} gradwire.attach takes, and nothing else here: attach a recipe to the model"
        other = "shard it with fully_shard (FSDP2)" if what == _FSDP1 else "train without gradwire"
        return (
            f"{averaged} gradwire does not support. Wrap the plain model in "
            f"torch.nn.parallel.DistributedDataParallel instead, or {other}"
        )
    if _is_inside_ddp(model):
        return ": this is the .module of one; attach to the DistributedDataParallel around it, and train that"
    return (
        "; wrap the model first, in torch.nn.parallel.DistributedDataParallel, or shard it with fully_shard. "
        "In a loop without either, use gradwire.Averager"
    )


_FSDP1, _FSDP2 = "FullyShardedDataParallel (FSDP)", "fully_shard() (FSDP2)"
# Other ways of data-parallel training, by the class that a model then has or derives from.
_OTHER_WRAPPERS = {
    "FullyShardedDataParallel": _FSDP1,
    "ReplicateModule": "replicate()",
    "FSDPModule": _FSDP2,
    "DataParallel": "DataParallel, in one process",
}


def _wrapper_name(kind: type) -> str | None:
    """Return the name of the way of training that a class of torch stands for; None if it stands for none."""
    if kind.__name__ == "DDP" and kind.__module__ == "torch.distributed._composable.replicate":
        return "replicate()"
    return _OTHER_WRAPPERS.get(kind.__name__) if kind.__module__.startswith("torch.") else None


def _is_inside_ddp(model: nn.Module) -> bool:
    """Return True if a ``DistributedDataParallel`` of this process wraps ``model``."""
    # Slow, and for errors only. `type` and not isinstance: some objects answer for others.
    found = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return any(each.module is model for each in found)


def device_of(ddp: DistributedDataParallel) -> torch.device:
    """Return the device of the model's gradients; ValueError if it has none."""
    for parameter in ddp.module.parameters():
        if parameter.requires_grad:
            device: torch.device = parameter.device
            return device
    raise ValueError(
        "no parameter of this model requires a gradient any more: there is nothing to average; "
        "unfreeze a parameter before you attach"
    )


def require_single(ddp: DistributedDataParallel) -> None:
    """Raise ValueError if a ``DistributedDataParallel`` inside this one averages parameters of it, too."""
    averaged = {id(parameter) for parameter in trained_parameters(ddp).values()}
    for name, module in ddp.module.named_modules(prefix="module"):
        if is_ddp(module) and averaged & {id(parameter) for parameter in module.parameters()}:
            raise ValueError(
                f"the .{name} of this DistributedDataParallel is a DistributedDataParallel too, so gradients "
                "would be averaged twice: wrap the plain model once"
            )


def trained_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are averaged, by name."""
    return {name: p for name, p in shared_parameters(ddp).items() if p.requires_grad}


def bucketed_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters that may be in buckets: trained ones, and those frozen after DDP was made."""
    now = trained_parameters(ddp)
    was_frozen_later = len(now) != num_bucketed(ddp)
    return shared_parameters(ddp) if was_frozen_later else now


def num_bucketed(ddp: DistributedDataParallel) -> int:
    """Return the number of parameters in all buckets of the model; never inside a hook, where it hangs."""
    number: int = ddp_facts(ddp)["num_parameter_tensors"]
    return number


def num_unfrozen(ddp: DistributedDataParallel) -> int:
    """Return the number of trained parameters that were frozen when DDP was made, and are in no bucket.

    Those that were frozen since are not told apart: each of them hides one.
    """
    return max(0, len(trained_parameters(ddp)) - num_bucketed(ddp))


def shared_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return all parameters that DDP keeps the same on all ranks, frozen ones too, by name."""
    ignored = ddp.parameters_to_ignore
    return {canonical_name(name): p for name, p in ddp.module.named_parameters() if name not in ignored}


def claim_of(ddp: DistributedDataParallel, chosen: dict[str, str]) -> dict[str, str]:
    """Return the facts that must be equal on all ranks: the ``chosen`` ones, and those of the model."""
    return {
        **fingerprint.of_version(),
        **chosen,
        "find_unused_parameters": str(ddp.find_unused_parameters),
        "static_graph": str(ddp.static_graph),
        **fingerprint.of_parameters(trained_parameters(ddp).items()),
    }


def may_exchange_after_backward(ddp: DistributedDataParallel) -> bool:
    """Return False if ranks may not exchange messages of ours at the end of a backward pass.

    In ``join()`` of a model that finds unused parameters, DDP exchanges the used ones, on some ranks before
    such messages and on others after.
    """
    return not (ddp.find_unused_parameters and is_joining(ddp))


def num_transient(ddp: DistributedDataParallel) -> int:
    """Return the number of steps before DDP rebuilds its buckets; 0 if never, or if buckets cannot wait."""
    if ddp.mixed_precision is not None:
        return 0  # DDP's own hook waits for each bucket before it takes the next
    if ddp.static_graph:
        return 2
    return 0 if ddp.find_unused_parameters else 1


def resolve_for_model(recipe: Recipe, ddp: DistributedDataParallel) -> Recipe:
    """Return ``recipe`` resolved for this model's parameters; ValueError if it does not fit the model."""
    return resolve_for_module(recipe, ddp.module, trained_parameters(ddp), ddp.process_group.size())
