"""A recipe for every model that a script makes: DDP models, and those that it shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwire.ddp import AfterAttach, Attachments, Wire, replaced
from gradwire.ddp import attach_to_all as attach_to_all_ddp
from gradwire.recipes import Recipe
from gradwire.sharded.attaching import attach
from gradwire.sharded.checks import is_attached
from gradwire.sharded.units import find_units


@contextlib.contextmanager
def attach_to_all(
    recipe: str | Recipe, after_attach: AfterAttach = lambda model, wire: None, **options: Any
) -> Iterator[Attachments]:
    """Attach ``recipe`` to every ``DistributedDataParallel`` and every sharded model inside this context.

    ``after_attach`` is called with each model and its wire. ``options`` are those of `attach`.

    A sharded model is attached to at its first forward pass: a script shards the parts of a model before the
    whole, and only then is it known which is the whole. A model that cannot be attached to is left to torch,
    with a warning. Raises ValueError if there is no such recipe.
    """
    with attach_to_all_ddp(recipe, after_attach, **options) as attachments:

        def attach_to_shards(model: nn.Module) -> None:
            wire = attachments.add(_attach_unless_attached, model, options, "torch")
            if wire is not None:
                after_attach(model, wire)

        with _watching_shards(attach_to_shards):
            yield attachments


@contextlib.contextmanager
def _watching_shards(attach_to: Callable[[nn.Module], None]) -> Iterator[None]:
    import torch.distributed.fsdp as torch_fsdp  # here, since it takes a second

    original = getattr(torch_fsdp, "fully_shard", None)
    if original is None:  # before torch 2.6
        yield
        return

    watched: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attach_once(root: nn.Module, _: Any) -> None:
        for module in root.modules():  # the parts come after the whole
            if handle := watched.pop(module, None):
                handle.remove()
        attach_to(root)

    @functools.wraps(original)
    def shard_and_watch(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = original(module, *args, **kwargs)
        for each in [module] if isinstance(module, nn.Module) else module:
            # Before torch's own hook, which gathers parameters.
            watched[each] = each.register_forward_pre_hook(attach_once, prepend=True)
        return sharded

    with replaced(torch_fsdp, "fully_shard", shard_and_watch):
        yield


def _attach_unless_attached(model: nn.Module, recipe: Recipe, **options: Any) -> Wire | None:
    """Attach to a model, unless the script has done so itself."""
    units = find_units(model)
    if not units or any(is_attached(unit) for unit in units):
        return None
    telemetry = options.get("telemetry")
    if telemetry is not None and units[0].replicate_group is None:
        # Errors are of whole gradients, which shards are not; all else is recorded.
        options = {**options, "telemetry": replace(telemetry, errors=False)}
    return attach(model, recipe, **options)
