"""A recipe for every DDP model that a script makes, unless the script registers a hook itself."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.attaching import attach
from gradwire.ddp.ddp_attachment import DDPAttachment
from gradwire.ddp.replacing import replaced
from gradwire.ddp.wire import Wire, attachment_of, ddp_attachment_of
from gradwire.recipes import Recipe
from gradwire.recipes import recipe as parse_recipe

log = logging.getLogger("gradwire")

AfterAttach = Callable[[nn.Module, Wire], None]


@dataclass(frozen=True)
class AttachedModel:
    """One model's wire, with the rank and world size, which outlive the process group."""

    wire: Wire
    rank: int
    world_size: int

    @property
    def num_steps(self) -> int:
        """The number of steps of the run, including those before it was resumed."""
        return attachment_of(self.wire).bridge.num_steps


@dataclass
class Attachments:
    """The attachments so far."""

    recipe: Recipe
    made: list[AttachedModel] = field(default_factory=list)
    num_given_way: int = 0
    """The number of models for which the script has registered its own hook."""
    num_refused: int = 0
    """The number of models that could not be attached to."""

    def add(
        self, attach: Callable[..., Wire | None], model: nn.Module, options: dict[str, Any], otherwise: str
    ) -> Wire | None:
        """Attach the recipe to a model by ``attach``, and return the wire, if there is one.

        If the model is refused, log that ``otherwise`` averages it.
        """
        try:
            wire = attach(model, self.recipe, **options)
        except ValueError as error:
            self.num_refused += 1
            log.warning("%s is not attached, and %s averages as usual: %s", self.recipe, otherwise, error)
            return None
        if wire is not None:
            self.made.append(AttachedModel(wire, wire.group.rank(), wire.group.size()))
        return wire


@contextlib.contextmanager
def attach_to_all(
    recipe: str | Recipe, after_attach: AfterAttach = lambda model, wire: None, **options: Any
) -> Iterator[Attachments]:
    """Attach ``recipe`` to every ``DistributedDataParallel`` that is made inside this context.

    ``after_attach`` is called with each model and its wire. ``options`` are those of `attach`.

    A hook that the script registers with such a model replaces the recipe, and so does another
    `gradwire.attach`. A model that takes no hook is left to DDP. Both log a warning. Raises ValueError if
    there is no such recipe.
    """
    attachments = Attachments(parse_recipe(recipe))
    make = DistributedDataParallel.__init__
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(make)
    def make_and_attach(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        wire = attachments.add(attach, self, options, "DDP")
        if wire is not None:
            ddp_attachment_of(wire).give_way(functools.partial(_give_way, attachments, wire))
            after_attach(self, wire)

    @functools.wraps(register)
    def register_instead(self: DistributedDataParallel, state: Any, hook: Any) -> None:
        attached = [attachment_of(each.wire) for each in attachments.made if each.wire.attached]
        if any(isinstance(each, DDPAttachment) and each.is_on(self) for each in attached):
            # DDP takes one hook, and has ours: attach the script's hook behind it.
            attach(self, hook, state=state)
        else:
            register(self, state, hook)

    with (
        replaced(DistributedDataParallel, "__init__", make_and_attach),
        replaced(DistributedDataParallel, "register_comm_hook", register_instead),
    ):
        yield attachments


def _give_way(attachments: Attachments, wire: Wire) -> None:
    attachments.num_given_way += 1
    log.warning("the script registers its own hook, which is used instead of %s", wire.recipe)
