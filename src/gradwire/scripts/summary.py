"""Sum up a run: the bytes sent, the bytes saved and the errors, in a few lines."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.filesize import decimal

import gradwire
from gradwire.averaging import is_disabled
from gradwire.ddp import AttachedModel, Attachments, attachment_of
from gradwire.recipes import make_plan, scattered
from gradwire.scripts.observing import Observations
from gradwire.scripts.states import ScriptStates
from gradwire.tuning import decision_table

_SPAWNED_WITHOUT_MODELS = (
    "the script starts processes itself (torch.multiprocessing.spawn), and none of them has made a "
    "DistributedDataParallel that gradwire could see"
)


def summarize(
    attachments: Attachments,
    seen: Observations,
    of_children: Sequence[str] = (),
    num_children: int = 0,
    states: ScriptStates | None = None,
    saved_at: Collection[int] = (),
) -> str:
    """Return one line per model, as seen by this rank.

    Args:
        attachments: the models of this process.
        seen: what else the script has done.
        of_children: the lines of processes that the script has started itself.
        num_children: the number of such processes that made models.
        states: the states of the script's wires.
        saved_at: the steps after which the script has saved a checkpoint.
    """
    lines = [*describe_models(attachments, seen, states, saved_at), *of_children]
    if not lines and num_children:
        lines.append(
            f"attached in {num_children} processes that the script has started, which left no figures"
        )
    if not lines:
        made = f"{len(attachments.made)} DistributedDataParallel made" if attachments.made else "none made"
        lines.append(f"no model trained with it ({made})")
        if seen.has_spawned:
            lines.append(_SPAWNED_WITHOUT_MODELS)
    return "\n".join(f"gradwire {attachments.recipe}: {line}" for line in lines)


def describe_models(
    attachments: Attachments,
    seen: Observations,
    states: ScriptStates | None = None,
    saved_at: Collection[int] = (),
) -> list[str]:
    """Return the lines about the models of this process; none if it has trained none."""
    if attachments.made and is_disabled():
        return [f"{_models(len(attachments.made))} left to torch, because GRADWIRE_DISABLE is set"]
    lines = [_describe(a) for a in attachments.made if a.wire.stats().num_steps]
    if attachments.num_given_way:
        lines.append(f"{attachments.num_given_way} taken over by a hook of the script's own")
    if attachments.num_refused:
        models = _models(attachments.num_refused)
        lines.append(f"{models} left to torch, because gradwire could not attach; see above")
    num_trained = sum(a.wire.stats().num_steps > 0 for a in attachments.made)
    num_idle = len(attachments.made) - num_trained - attachments.num_given_way
    if num_idle > 0 and seen.num_optimizer_steps:
        lines.append(
            f"{num_idle} DistributedDataParallel averaged 0 steps, though optimizers took "
            f"{seen.num_optimizer_steps}: if it is to be trained, call the DistributedDataParallel itself, "
            "and not its .module, whose gradients stay on each rank"
        )
    if states is not None and states.are_kept:
        lines += states.describe(saved_at)
    elif saved_at and any(_remembers(a) for a in attachments.made):
        lines.append(
            "the script saved checkpoints without the state of this recipe (its step, what it holds back); "
            "a resumed run starts with an empty one. Keep it with --state DIR"
        )
    return lines


def _models(number: int) -> str:
    return "1 model" if number == 1 else f"{number} models"


def _remembers(made: AttachedModel) -> bool:
    """Return True if a run that loses the state of this wire differs from one that keeps it."""
    attachment = attachment_of(made.wire)
    has_state = bool(attachment.state.memory.named()) or attachment.tuned is not None
    return has_state or "schedule" in str(made.wire.recipe)


def _describe(made: AttachedModel) -> str:
    wire, stats = made.wire, made.wire.stats()
    if isinstance(wire.recipe, gradwire.Recipe) and not wire.recipe.exchange.communicates:
        return (
            f"{stats.num_steps} steps, and nothing averaged: each rank trained alone, for measurements only"
        )
    sent = stats.bytes_sent or 0
    text = f"{stats.num_steps} steps, {decimal(sent)} sent by rank {made.rank}"
    if made.world_size == 1:
        text += ", the only one (start more with --ranks or torchrun)"
    layouts = wire.layout()
    is_scattered = any(layout.num_shards > 1 for layout in layouts)
    recipe = scattered(gradwire.fp32()) if is_scattered else gradwire.fp32()
    plain = make_plan(recipe, layouts, made.rank, made.world_size)
    uncompressed = stats.num_steps * plain.bytes_sent
    if uncompressed:
        saved = uncompressed - sent
        text += f" instead of {decimal(uncompressed)} ({saved / uncompressed:.0%} saved)"
    text += f", {'no errors' if wire.failure is None else f'failed: {wire.failure}'}"
    decisions = [each.summary for each in wire.decisions()]
    return f"{text}; its decisions:\n{decision_table(decisions)}" if decisions else text
