"""The state of a wire as plain tensors and numbers: what is saved, and whether what comes back fits.

Note [The form of a state]: what is the same on all ranks stands under keys that are the same on all ranks;
tensors, which are each rank's own, have the rank in their key. torch.distributed.checkpoint keeps one value
for each key, and of what is no tensor only rank 0's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.averaging.timeline import Grouping
from gradwire.recipes import Reduction

_VERSION = 2
_KEYS = ("version", "recipe", "world_size", "step", "loss_scale", "layouts", "entries", "memory")

States = Mapping[str, Mapping[str, Tensor]]
"""By state and parameter, as `Memory.state_dict` gives them."""


@dataclass(frozen=True)
class Saved:
    """A state that has been checked, of one rank of this group."""

    recipe: str
    step: int
    timeline: list[tuple[int, Grouping]]
    memory: States
    loss_scale: float | None
    """What residuals were multiplied with; None if that was not known."""


def write(
    recipe: str,
    step: int,
    timeline: Sequence[tuple[int, Grouping]],
    memory: States,
    rank: int,
    world_size: int,
    loss_scale: float | None = None,
) -> dict[str, Any]:
    """The state of one rank, in the form of the note above."""
    return {
        "version": _VERSION,
        "recipe": recipe,
        "world_size": world_size,
        "step": step,
        "loss_scale": loss_scale,
        "layouts": write_layouts(timeline),
        # Sorted: in which order buckets are first exchanged, two at a time, is not the same on all ranks.
        "entries": sorted(
            [state, name, list(tensor.shape)] for state, own in memory.items() for name, tensor in own.items()
        ),
        "memory": {f"rank{rank}": {state: dict(tensors) for state, tensors in memory.items()}},
    }


def write_layouts(timeline: Sequence[tuple[int, Grouping]]) -> list[Any]:
    """A timeline as lists, numbers and strings."""
    return [[start, [[dtype, list(names)] for dtype, names in buckets]] for start, buckets in timeline]


def read_layouts(layouts: Sequence[Any]) -> list[tuple[int, Grouping]]:
    """The timeline that `write_layouts` was given."""
    return [(int(s), tuple((d, tuple(names)) for d, names in buckets)) for s, buckets in layouts]


def merge_state_dicts(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks of a run as one, which `Wire.load_state_dict` takes on any number of ranks.

    Raises ValueError for states of different runs or steps, and for a rank that is there twice.

    Example::

        state = gradwire.merge_state_dicts(torch.load(f"wire{rank}.pt") for rank in range(8))
        wire.load_state_dict(state)
    """
    merged: dict[str, Any] = {}
    for state in states:
        _require_keys(state)
        if not merged:
            merged = {**state, "memory": {}}
        for key in _KEYS[:-1]:
            if state[key] != merged[key]:
                raise ValueError(f"these states do not belong together: they differ in {key!r}")
        for rank, memory in state["memory"].items():
            if rank in merged["memory"]:
                raise ValueError(f"the state of {rank} is there twice")
            merged["memory"][rank] = memory
    if not merged:
        raise ValueError("there are no states to merge")
    return merged


def template(metadata: Mapping[str, Any], key: str, rank: int, world_size: int) -> dict[str, Any]:
    """What ``torch.distributed.checkpoint.load`` fills: a state of zeros, from a checkpoint's own metadata.

    With the tensors of this rank, or of all of them if there were more or fewer.
    """
    lead = f"{key}.memory."
    saved = {name[len(lead) :]: entry for name, entry in metadata.items() if name.startswith(lead)}
    if f"{key}.step" not in metadata:
        raise ValueError(f"this checkpoint has no wire's state under {key!r}")
    owners = {name.partition(".")[0] for name in saved}
    memory: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, entry in saved.items():
        owner, state, parameter = name.split(".", 2)
        if len(owners) != world_size or owner == f"rank{rank}":
            tensors = memory.setdefault(owner, {}).setdefault(state, {})
            tensors[parameter] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    blank = {**dict.fromkeys(_KEYS[:-1], 0), "recipe": "", "layouts": [], "entries": []}
    # What a state of another version has not would be an error of torch's, before its version is known.
    return {**{each: value for each, value in blank.items() if f"{key}.{each}" in metadata}, "memory": memory}


def read(
    state: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    required: Collection[str],
    rank: int,
    world_size: int,
    reduction: Reduction,
) -> Saved:
    """Check a state against the model's parameters; ValueError names what is wrong with it.

    It may have those of ``parameters``, and must have those that are ``required``.
    """
    _require_keys(state)
    step, saved_size = int(state["step"]), int(state["world_size"])
    timeline = read_layouts(state["layouts"])
    for _, grouping in timeline:
        known = {name for _, bucket in grouping for name in bucket}
        for name in sorted(known - parameters.keys()):
            raise ValueError(f"the state has a parameter {name!r}, which this model has not")
        for name in sorted(set(required) - known):
            raise ValueError(f"the state has no parameter {name!r}, which this model has")
    expected = {(key, name): tuple(shape) for key, name, shape in state["entries"]}
    _require_shapes(expected, parameters)
    wanted = range(saved_size) if saved_size != world_size else (rank,)
    memories = [_own(state["memory"], owner, expected, saved_size, world_size) for owner in wanted]
    own = memories[0] if saved_size == world_size else _spread(memories, world_size, reduction)
    loss_scale = None if state["loss_scale"] is None else float(state["loss_scale"])
    return Saved(str(state["recipe"]), step, timeline, own, loss_scale)


def _require_shapes(
    expected: Mapping[tuple[str, str], tuple[int, ...]], parameters: Mapping[str, Tensor]
) -> None:
    """Residuals are as large as the parameters are; all else is as the saved recipe had it."""
    for (key, name), shape in expected.items():
        if key.startswith("residual:"):
            wanted = tuple(parameters[name].shape) if name in parameters else None
            # Buckets hold complex parameters as pairs.
            if shape != wanted and not (wanted is not None and shape == (*wanted, 2)):
                raise ValueError(
                    f"the state has a {key} of parameter {name!r} with shape {shape}, and in this model that "
                    + ("does not exist" if wanted is None else f"has shape {wanted}")
                )


def _own(
    memory: Mapping[str, States],
    owner: int,
    expected: Mapping[tuple[str, str], tuple[int, ...]],
    saved_size: int,
    world_size: int,
) -> States:
    """The tensors of one rank, all there and in their shapes."""
    states = memory.get(f"rank{owner}", {})
    if expected and not states:
        why = (
            f"; it was saved on {saved_size} ranks and this group has {world_size}, so the states of all of "
            "them are needed: see gradwire.merge_state_dicts"
            if saved_size != world_size
            else "; each rank loads its own state"
        )
        raise ValueError(f"the state has no 'rank{owner}', only {sorted(memory)}{why}")
    there = {(key, name): tensor for key, tensors in states.items() for name, tensor in tensors.items()}
    for key, name in expected.keys() - there.keys():
        raise ValueError(f"the state of rank {owner} misses the {key} of parameter {name!r}")
    for key, name in there.keys() - expected.keys():
        raise ValueError(f"the state of rank {owner} has a {key} of parameter {name!r} that was not saved")
    for (key, name), tensor in there.items():
        if tuple(tensor.shape) != expected[key, name]:
            raise ValueError(
                f"the {key} of parameter {name!r} of rank {owner} has shape {tuple(tensor.shape)}, and was "
                f"saved with {expected[key, name]}"
            )
    return states


def _spread(memories: Sequence[States], world_size: int, reduction: Reduction) -> States:
    """What each of ``world_size`` ranks holds, so that together they hold back what all of these did.

    A residual is in units of a rank's own gradient. It counts for 1/W in a mean over W ranks, so what W
    ranks hold back of it is the mean of their residuals, and that is what each new rank gets. In a sum it
    counts in full, and each new rank gets its share of the sum. Everything else is one rank's guess at
    something that all share, and its mean is a guess as good.
    """
    spread: dict[str, dict[str, Tensor]] = {}
    for key, tensors in memories[0].items():
        is_share = reduction == "sum" and key.startswith("residual:")
        for name, first in tensors.items():
            wide = torch.complex128 if first.is_complex() else torch.float64
            total = torch.stack([memory[key][name].to(wide) for memory in memories]).sum(0)
            total /= world_size if is_share else len(memories)
            spread.setdefault(key, {})[name] = total.to(first.dtype)
    return spread


def _require_keys(state: Mapping[str, Any]) -> None:
    # First: a state of another version has other keys.
    if state.get("version", _VERSION) != _VERSION:
        raise ValueError(f"this state has version {state['version']}, and this gradwire reads {_VERSION}")
    for key in _KEYS:
        if key not in state:
            raise ValueError(f"this is no state of a wire: it has no {key!r}")
    for key in state:
        if key not in _KEYS:
            raise ValueError(f"this is no state of a wire: it has a {key!r}, which none has")
