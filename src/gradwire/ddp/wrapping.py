"""`wrap`, which makes a model with buckets that suit its recipe."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.attaching import attach
from gradwire.ddp.bucket_size import best_bucket_mb
from gradwire.ddp.choice import parse_choice
from gradwire.ddp.hook_info import Hook
from gradwire.ddp.wire import Wire
from gradwire.links import parse_rate
from gradwire.recipes import Recipe
from gradwire.torch_private import fsdp, uncompiled

_OF_ATTACH = frozenset(inspect.signature(attach).parameters) - {"model", "recipe"}
_OF_DDP = frozenset(inspect.signature(DistributedDataParallel).parameters) - {"module"}


def wrap(
    module: nn.Module, recipe: str | Recipe | Hook = "fp32", *, link: str | None = None, **options: Any
) -> tuple[DistributedDataParallel, Wire]:
    """Make a ``DistributedDataParallel`` whose buckets suit ``recipe``, and attach the recipe to it.

    Collective: every rank calls it, with the same arguments.

    Args:
        module: the model to train, on its device.
        recipe: as for `attach`.
        link: the rate of the links between nodes, such as ``"100mbit"``; by default ``"1gbit"``. The slower
            it is, the fewer bytes are enough for small buckets.
        options: those of ``DistributedDataParallel`` and of `attach`. By default ``bucket_cap_mb`` is what
            suits the recipe on the module's device and the link, and ``gradient_as_bucket_view`` is True,
            which saves a copy of all gradients.

    Returns:
        The model, and the wire that `attach` has returned for it.

    Raises:
        TypeError: this is no module, it is a ``DistributedDataParallel`` or sharded already, neither has an
            option of this name, or the link is no text.
        ValueError: the link is no rate.
        TypeError, ValueError, OSError, RuntimeError: as ``DistributedDataParallel`` and `attach` do.

    >>> model, wire = gradwire.wrap(torch.nn.Linear(64, 64), "int8", static_graph=True, verify_every=100)
    >>> model(inputs).sum().backward()
    >>> wire.stats().num_steps
    1
    """
    _check_module(module)
    _check_names(options)
    chosen = parse_choice(recipe)
    bits_per_s = None if link is None else parse_rate(link)
    of_attach = {name: value for name, value in options.items() if name in _OF_ATTACH}
    of_ddp = {name: value for name, value in options.items() if name not in _OF_ATTACH}
    of_ddp.setdefault("gradient_as_bucket_view", True)
    if isinstance(chosen, Recipe):
        trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
        of_ddp.setdefault("bucket_cap_mb", best_bucket_mb(chosen, module, trained, bits_per_s))
    model = DistributedDataParallel(module, **of_ddp)
    return model, attach(model, chosen, **of_attach)


def _check_module(module: object) -> None:
    """Raise TypeError for what is no plain module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"gradwire.wrap takes a torch.nn.Module, not {type(module).__name__}")
    if isinstance(uncompiled(module), DistributedDataParallel):
        raise TypeError(
            "gradwire.wrap makes the DistributedDataParallel itself: give it the module inside, or attach to "
            "this one by gradwire.attach(model, recipe)"
        )
    sharded = fsdp.fsdp_module_kind()
    if sharded is not None and any(isinstance(part, sharded) for part in module.modules()):
        raise TypeError(
            "gradwire.wrap makes a DistributedDataParallel, and fully_shard has sharded this model: call "
            "gradwire.attach(model, recipe) instead"
        )


def _check_names(options: Iterable[str]) -> None:
    """Raise TypeError for an option that neither DDP nor `attach` has."""
    known = _OF_ATTACH | _OF_DDP
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            raise TypeError(f"neither DistributedDataParallel nor gradwire.attach takes {name}= here{hint}")
