"""The state of a wire as plain tensors and numbers: written, merged, and checked when it is read.

Note [The form of a state]: torch.distributed.checkpoint keeps one value per key, and for values that are not
tensors only rank 0's. So values that are the same on all ranks have the same key on all ranks. Tensors,
which differ between ranks, have the rank in their key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.averaging.state_fields import (
    KEYS,
    OPTIONAL_KEYS,
    VERSION,
    Fields,
    States,
    check_fields,
    read_layouts,
    require_count,
    require_tensors,
)
from gradwire.averaging.timeline import Grouping
from gradwire.buckets import dtype_named
from gradwire.recipes import Reduction

__all__ = [
    "Fields",
    "Saved",
    "States",
    "check_fields",
    "merge_state_dicts",
    "read",
    "read_layouts",
    "require_count",
    "require_tensors",
    "template",
    "write",
    "write_layouts",
]


@dataclass(frozen=True)
class Saved:
    """The state of one rank, checked against the model."""

    recipe: str
    step: int
    timeline: list[tuple[int, Grouping]]
    memory: States
    loss_scale: float | None
    """The loss scale that residuals include; None if it was not known."""
    world_size: int = 1
    """The number of ranks that saved it."""
    tuning: str | None = None
    """The state of recipe ``auto``; None for other recipes."""


def write(
    recipe: str,
    step: int,
    timeline: Sequence[tuple[int, Grouping]],
    memory: States,
    rank: int,
    world_size: int,
    loss_scale: float | None = None,
) -> dict[str, Any]:
    """Return the state of one rank, in the form of the note above."""
    return {
        "version": VERSION,
        "recipe": recipe,
        "world_size": world_size,
        "step": step,
        "loss_scale": loss_scale,
        "layouts": write_layouts(timeline),
        # Sorted, since two buckets are in flight and ranks may not finish them in the same order.
        "entries": sorted(
            [state, name, list(tensor.shape)] for state, own in memory.items() for name, tensor in own.items()
        ),
        "memory": {f"rank{rank}": {state: dict(tensors) for state, tensors in memory.items()}},
    }


def write_layouts(timeline: Sequence[tuple[int, Grouping]]) -> list[Any]:
    """Return a timeline as lists, numbers and strings."""
    return [[start, [[dtype, list(names)] for dtype, names in buckets]] for start, buckets in timeline]


def merge_state_dicts(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one that `Wire.load_state_dict` takes on any number of ranks.

    Raises ValueError for states of different runs or steps, and for a rank that occurs twice.

    Load the states of all ranks that saved, such as ``torch.load(f"wire{rank}.pt") for rank in range(8)``:

    >>> wire = gradwire.attach(model, "int4")
    >>> states = [wire.state_dict()]
    >>> wire.load_state_dict(gradwire.merge_state_dicts(states))
    """
    merged: dict[str, Any] = {}
    for state in states:
        check_fields(state)
        if not merged:
            merged = {**state, "memory": {}}
        for key in (*KEYS[:-1], *OPTIONAL_KEYS):
            if state.get(key) != merged.get(key):
                raise ValueError(
                    f"these states do not belong together: they differ in {key!r}; "
                    "merge the states that all ranks saved at one step of one run"
                )
        for rank, memory in state["memory"].items():
            if rank in merged["memory"]:
                raise ValueError(f"the state of {rank} is there twice; merge one state per rank")
            merged["memory"][rank] = memory
    if not merged:
        raise ValueError("there are no states to merge")
    return merged


def template(metadata: Mapping[str, Any], key: str, rank: int, world_size: int) -> dict[str, Any]:
    """Return a state of zeros for ``torch.distributed.checkpoint.load`` to fill, made from its metadata.

    It has the tensors of this rank, or those of all ranks if the number of ranks has changed.
    """
    lead = f"{key}.memory."
    saved = {name[len(lead) :]: entry for name, entry in metadata.items() if name.startswith(lead)}
    if f"{key}.step" not in metadata:
        raise ValueError(
            f"this checkpoint has no wire's state under {key!r}; pass the key it was saved under"
        )
    owners = {name.partition(".")[0] for name in saved}
    memory: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, entry in saved.items():
        owner, state, parameter = name.split(".", 2)
        if len(owners) != world_size or owner == f"rank{rank}":
            tensors = memory.setdefault(owner, {}).setdefault(state, {})
            tensors[parameter] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    blank = {**dict.fromkeys(KEYS[:-1], 0), "recipe": "", "layouts": [], "entries": [], "tuning": ""}
    # Only keys that were saved: for others torch raises, before the version of the state can be checked.
    return {**{each: value for each, value in blank.items() if f"{key}.{each}" in metadata}, "memory": memory}


def read(
    state: Mapping[str, Any],
    parameters: Mapping[str, Tensor] | None,
    required: Collection[str],
    rank: int,
    world_size: int,
    reduction: Reduction,
) -> Saved:
    """Check a state against the model and return it; ValueError says what does not fit.

    The state may hold any of ``parameters``, and must hold those that are ``required``. If ``parameters`` is
    None, they are not known yet: the first step that averages them compares their shapes.
    """
    fields = check_fields(state)
    if parameters is not None:
        _require_names(fields.layouts, parameters, required)
        for dtype, names in (bucket for _, grouping in fields.layouts for bucket in grouping):
            for name in names:
                _require_realness(dtype, name, parameters[name])
        _require_shapes(fields.entries, parameters)
    saved_size = fields.world_size
    # Without entries nothing was held back on any rank.
    wanted = range(saved_size if fields.entries else 0) if saved_size != world_size else (rank,)
    memories = []
    for owner in wanted:
        _require_states(fields.memory, owner, fields.entries, saved_size, world_size)
        memories.append(fields.memory.get(owner, {}))
    own = memories[0] if saved_size == world_size else _redistribute(memories, world_size, reduction)
    return Saved(
        fields.recipe, fields.step, fields.layouts, own, fields.loss_scale, saved_size, fields.tuning
    )


def _require_realness(dtype: str, name: str, parameter: Tensor) -> None:
    """Raise ValueError if a dtype is complex and the parameter is not."""
    if dtype_named(dtype).is_complex and not parameter.is_complex():
        raise ValueError(f"the state has {dtype} values of parameter {name!r}, which is real in this model")


def _require_names(
    timeline: Sequence[tuple[int, Grouping]], parameters: Collection[str], required: Collection[str]
) -> None:
    """Raise ValueError if a grouping has a parameter that the model has not, or lacks a required one."""
    for _, grouping in timeline:
        known = {name for _, bucket in grouping for name in bucket}
        for name in sorted(known - set(parameters)):
            raise ValueError(f"the state has a parameter {name!r}, which this model has not")
        for name in sorted(set(required) - known):
            raise ValueError(f"the state has no parameter {name!r}, which this model has")


def _require_shapes(
    expected: Mapping[tuple[str, str], tuple[int, ...]], parameters: Mapping[str, Tensor]
) -> None:
    """Raise ValueError for a residual of an unknown parameter, or of another shape; other states may differ.

    Factors of one matrix for a whole bucket belong to no parameter.
    """
    for (key, name), shape in expected.items():
        if name not in parameters:
            if not key.startswith("residual:"):
                continue
            raise ValueError(f"the state has a {key} of parameter {name!r}, which this model has not")
        parameter = parameters[name]
        _require_realness(key.rpartition(":")[2], name, parameter)
        wanted = tuple(parameter.shape)
        # A complex parameter is a pair of real values in its bucket.
        fits = shape == wanted or (parameter.is_complex() and shape == (*wanted, 2))
        if key.startswith("residual:") and not fits:
            raise ValueError(
                f"the state has a {key} of parameter {name!r} with shape {shape}, but in this model that "
                f"parameter has shape {wanted}"
            )


def _require_states(
    memory: Mapping[int, States],
    owner: int,
    expected: Mapping[tuple[str, str], tuple[int, ...]],
    saved_size: int,
    world_size: int,
) -> None:
    """Raise ValueError if a tensor of one saved rank is missing, unknown or of another shape."""
    states = memory.get(owner, {})
    if expected and not states:
        why = (
            f"; it was saved on {saved_size} ranks and this group has {world_size}, so the states of all of "
            "them are needed: see gradwire.merge_state_dicts"
            if saved_size != world_size
            else "; each rank loads its own state. To save on one rank alone, save what "
            "state_dict(gather=True) returns, called on every rank"
        )
        there_are = [f"rank{rank}" for rank in sorted(memory)]
        raise ValueError(f"the state has no 'rank{owner}', only {there_are}{why}")
    there = {(key, name): tensor for key, tensors in states.items() for name, tensor in tensors.items()}
    for key, name in expected.keys() - there.keys():
        raise ValueError(f"the state of rank {owner} has no {key} of parameter {name!r}, which was saved")
    for key, name in there.keys() - expected.keys():
        raise ValueError(f"the state of rank {owner} has a {key} of parameter {name!r} that was not saved")
    for (key, name), tensor in there.items():
        if tuple(tensor.shape) != expected[key, name]:
            raise ValueError(
                f"the {key} of parameter {name!r} of rank {owner} has shape {tuple(tensor.shape)}, but was "
                f"saved with shape {expected[key, name]}"
            )


def _redistribute(memories: Sequence[States], world_size: int, reduction: Reduction) -> States:
    """Return the states of each of ``world_size`` new ranks, made from those of all saved ranks.

    Together, the new ranks hold back as much as the saved ranks did. A residual is in units of a rank's own
    gradient. In a mean over W ranks it counts for 1/W, so each new rank gets the mean of the saved residuals.
    In a sum it counts in full, so each new rank gets an equal share of their sum. Other states, such as
    factors, are every rank's estimate of the same thing, so each new rank gets their mean.
    """
    spread: dict[str, dict[str, Tensor]] = {}
    for key, tensors in memories[0].items() if memories else ():
        is_share = reduction == "sum" and key.startswith("residual:")
        for name, first in tensors.items():
            wide = torch.complex128 if first.is_complex() else torch.float64
            total = torch.stack([memory[key][name].to(wide) for memory in memories]).sum(0)
            total /= world_size if is_share else len(memories)
            spread.setdefault(key, {})[name] = total.to(first.dtype)
    return spread
