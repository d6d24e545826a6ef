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

from gradwire.averaging.grid import Grid
from gradwire.averaging.redistribution import memory_of
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
from gradwire.buckets import dtype_named, is_gradient_state, shard_shape
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
    grid: Grid,
    loss_scale: float | None = None,
    tuning: str | None = None,
) -> dict[str, Any]:
    """Return the state of one rank, in the form of the note above; `Saved` explains its parts."""
    return {
        "version": VERSION,
        "recipe": recipe,
        "world_size": grid.world_size,
        "step": step,
        "loss_scale": loss_scale,
        "layouts": write_layouts(timeline),
        # Sorted, since two buckets are in flight and ranks may not finish them in the same order.
        "entries": sorted(
            [state, name, list(tensor.shape)] for state, own in memory.items() for name, tensor in own.items()
        ),
        "memory": {grid.name(rank): {state: dict(tensors) for state, tensors in memory.items()}},
        **({} if tuning is None else {"tuning": tuning}),
    }


def write_layouts(timeline: Sequence[tuple[int, Grouping]]) -> list[Any]:
    """Return a timeline as lists, numbers and strings."""
    return [[start, [[dtype, list(names)] for dtype, names in buckets]] for start, buckets in timeline]


def merge_state_dicts(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one that `Wire.load_state_dict` takes on any number of ranks.

    Raises ValueError for states of different runs or steps, and for a rank that occurs twice. Raises
    TypeError for what is no state, and for a state that is not in a list.

    Load the states of all ranks that saved, such as ``torch.load(f"wire{rank}.pt") for rank in range(8)``:

    >>> wire = gradwire.attach(model, "int4")
    >>> states = [wire.state_dict()]
    >>> wire.load_state_dict(gradwire.merge_state_dicts(states))
    """
    if isinstance(states, Mapping):
        raise TypeError("merge_state_dicts takes the states of all ranks, as a list, not one state")
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


def template(metadata: Mapping[str, Any], key: str, rank: int, grid: Grid) -> dict[str, Any]:
    """Return a state of zeros for ``torch.distributed.checkpoint.load`` to fill, made from its metadata.

    It has the tensors of this rank, or those of all ranks if the number of ranks or shards has changed.
    """
    lead = f"{key}.memory."
    saved = {name[len(lead) :]: entry for name, entry in metadata.items() if name.startswith(lead)}
    if f"{key}.step" not in metadata:
        raise ValueError(
            f"this checkpoint has no wire's state under {key!r}; pass the key it was saved under"
        )
    own = grid.name(rank)
    is_same = {name.partition(".")[0] for name in saved} == set(map(grid.name, range(grid.world_size)))
    memory: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, entry in saved.items():
        owner, state, parameter = name.split(".", 2)
        if not is_same or owner == own:
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
    grid: Grid,
    reduction: Reduction,
    shard_dims: Mapping[str, int] | None = None,
) -> Saved:
    """Check a state against the model and return it; ValueError says what does not fit.

    The state may hold any of ``parameters``, and must hold those that are ``required``. If ``parameters`` is
    None, they are not known yet: the first step that averages them compares their shapes. Parameters are
    whole, also on ranks that hold shards of them; ``shard_dims`` are the dimensions in which they are cut, by
    default the first.
    """
    fields = check_fields(state)
    if parameters is not None:
        _require_names(fields.layouts, parameters, required)
        for dtype, names in (bucket for _, grouping in fields.layouts for bucket in grouping):
            for name in names:
                _require_realness(dtype, name, parameters[name])
        _require_shapes(fields, parameters, shard_dims or {})
    elif fields.grid.num_shards > 1 and fields.entries:
        raise ValueError("this state was saved with shards of a model: load it on a wire, with its model")
    shapes = {name: parameter.shape for name, parameter in (parameters or {}).items()}
    memory = memory_of(fields, rank, grid, shapes, shard_dims or {}, reduction)
    saved_size = fields.grid.world_size
    return Saved(
        fields.recipe, fields.step, fields.layouts, memory, fields.loss_scale, saved_size, fields.tuning
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


def _require_shapes(fields: Fields, parameters: Mapping[str, Tensor], shard_dims: Mapping[str, int]) -> None:
    """Raise ValueError for a residual or velocity of an unknown parameter, or of another shape.

    Other states may differ: factors of one matrix for a whole bucket belong to no parameter.
    """
    for (key, name), shape in fields.entries.items():
        if name not in parameters:
            if not is_gradient_state(key):
                continue
            raise ValueError(f"the state has a {key} of parameter {name!r}, which this model has not")
        parameter = parameters[name]
        _require_realness(key.rpartition(":")[2], name, parameter)
        wanted = shard_shape(parameter.shape, shard_dims.get(name, 0), fields.grid.num_shards)
        # A complex parameter is a pair of real values in its bucket.
        fits = shape == wanted or (parameter.is_complex() and shape == (*wanted, 2))
        if is_gradient_state(key) and not fits:
            raise ValueError(
                f"the state has a {key} of parameter {name!r} with shape {shape}, but in this model that "
                f"parameter{' or its shard' * (fields.grid.num_shards > 1)} has shape {wanted}"
            )
