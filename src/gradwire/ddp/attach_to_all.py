"""Attaches a recipe to every DDP model that is made, and gives way to hooks of the script's own."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.attaching import attach
from gradwire.ddp.wire import Wire, attachment_of
from gradwire.recipes import Recipe
from gradwire.recipes import recipe as parse_recipe

log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class AttachedModel:
    """One model's wire, with the rank and world size, which are needed when the process group is gone."""

    wire: Wire
    rank: int
    world_size: int


@dataclass
class Attachments:
    """What has been attached so far."""

    recipe: Recipe
    made: list[AttachedModel] = field(default_factory=list)
    num_given_way: int = 0
    """Models that a hook of the script's own took over."""
    num_refused: int = 0
    """Models that could not be attached to."""


@contextlib.contextmanager
def attach_to_all(recipe: str | Recipe) -> Iterator[Attachments]:
    """While this lasts, every ``DistributedDataParallel`` averages by ``recipe`` as soon as it is made.

    A hook that is registered with such a model afterwards wins, with a warning in the log, and so does
    another `gradwire.attach`. A model that takes no hook is left to DDP, with a warning. Raises
    ValueError if there is no such recipe.
    """
    attachments = Attachments(parse_recipe(recipe))
    make = DistributedDataParallel.__init__
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(make)
    def make_and_attach(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _attach(self, attachments)

    @functools.wraps(register)
    def register_instead(self: DistributedDataParallel, state: Any, hook: Any) -> None:
        if any(a.wire.attached and attachment_of(a.wire).is_on(self) for a in attachments.made):
            # DDP's one hook is ours already: theirs goes behind it.
            attach(self, hook, state=state)
        else:
            register(self, state, hook)

    DistributedDataParallel.__init__ = make_and_attach  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = register_instead  # type: ignore[method-assign]
    try:
        yield attachments
    finally:
        DistributedDataParallel.__init__ = make  # type: ignore[method-assign]
        DistributedDataParallel.register_comm_hook = register  # type: ignore[method-assign]


def _attach(model: DistributedDataParallel, attachments: Attachments) -> None:
    try:
        wire = attach(model, attachments.recipe)
    except ValueError as error:
        attachments.num_refused += 1
        log.warning("%s is not attached, DDP averages as it is: %s", attachments.recipe, error)
        return
    group: dist.ProcessGroup = model.process_group
    attachments.made.append(AttachedModel(wire, group.rank(), group.size()))

    def tell() -> None:
        attachments.num_given_way += 1
        log.warning("the script registers a hook of its own, which is used instead of %s", wire.recipe)

    attachment_of(wire).give_way(tell)
