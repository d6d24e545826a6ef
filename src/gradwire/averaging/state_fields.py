"""The fields of a saved state: each is checked once, before anything uses it.

A checkpoint is a file that anybody may have written. So no text, number or tensor of it is used before its
type and its range are known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.averaging.grid import Grid, parse_name
from gradwire.averaging.timeline import Grouping
from gradwire.buckets import dtype_named

VERSION = 2
KEYS = ("version", "recipe", "world_size", "step", "loss_scale", "layouts", "entries", "memory")
OPTIONAL_KEYS = ("tuning",)
"""Keys that only the states of some recipes have."""

States = Mapping[str, Mapping[str, Tensor]]
"""Tensors by state and by parameter, as `Memory.state_dict` returns them."""

# More steps, ranks or values than any run has; a number beyond it is not one that was saved.
_MOST = 2**48


@dataclass(frozen=True)
class Fields:
    """A state whose fields have their types and ranges; nothing is known of how it fits a model."""

    recipe: str
    grid: Grid
    """The ranks that saved it."""
    step: int
    loss_scale: float | None
    layouts: list[tuple[int, Grouping]]
    entries: dict[tuple[str, str], tuple[int, ...]]
    """The shape of each tensor, by state and parameter."""
    memory: dict[int, States]
    """The tensors of each rank that is there."""
    tuning: str | None = None
    """The state of recipe ``auto``, as text; None for other recipes."""


def check_fields(state: object) -> Fields:
    """Return the fields of a state; TypeError or ValueError names the field that is wrong."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"a wire's state is a mapping, as Wire.state_dict returns it, not {type(state).__name__}"
        )
    _require_keys(state)
    world_size = require_count("world_size", state["world_size"], least=1)
    if not isinstance(state["recipe"], str):
        raise _wrong("recipe", "text", state["recipe"])
    tuning = state.get("tuning")
    if not isinstance(tuning, str | None):
        raise _wrong("tuning", "text", tuning)
    memory, num_shards = _memory(state["memory"], world_size)
    return Fields(
        state["recipe"],
        Grid(world_size, num_shards),
        require_count("step", state["step"]),
        _loss_scale(state["loss_scale"]),
        read_layouts(state["layouts"]),
        _entries(state["entries"]),
        memory,
        tuning,
    )


def require_count(field: str, value: object, least: int = 0) -> int:
    """Return a whole number of at least ``least``; ValueError names the field."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a tensor raises any of these
        number = least - 1
    if not least <= number < _MOST:
        raise _wrong(field, f"a whole number from {least} to {_MOST}", value)
    return number


def require_tensors(field: str, value: object) -> Mapping[str, Tensor]:
    """Return a mapping from names to dense tensors with values; ValueError names the field."""
    for name, tensor in _mapping(field, value).items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise _wrong(f"{field}[{name!r:.80}]", "a dense tensor", tensor)
    return value  # type: ignore[return-value]


def read_layouts(layouts: object) -> list[tuple[int, Grouping]]:
    """Return the timeline that `checkpoint.write_layouts` was given; ValueError if it is none."""
    timeline: list[tuple[int, Grouping]] = []
    for number, entry in enumerate(_sequence("layouts", layouts)):
        field = f"layouts[{number}]"
        start, buckets = _sequence(field, entry, 2)
        grouping = tuple(_bucket(field, bucket) for bucket in _sequence(field, buckets))
        names = [name for _, own in grouping for name in own]
        if len(set(names)) < len(names):
            raise ValueError(f"{field} of this state has a parameter twice")
        timeline.append((require_count(field, start), grouping))
    if timeline != sorted(timeline, key=operator.itemgetter(0)):
        raise ValueError("the layouts of this state are not in the order of their steps")
    return timeline


def _bucket(field: str, bucket: object) -> tuple[str, tuple[str, ...]]:
    dtype, names = _sequence(field, bucket, 2)
    dtype_named(dtype)
    own = tuple(_sequence(field, names))
    if not own or not all(isinstance(name, str) for name in own):
        raise _wrong(field, "a bucket of at least one parameter's name", names)
    return dtype, own


def _entries(entries: object) -> dict[tuple[str, str], tuple[int, ...]]:
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for number, entry in enumerate(_sequence("entries", entries)):
        field = f"entries[{number}]"
        key, name, shape = _sequence(field, entry, 3)
        _require_state_key(field, key)
        if not isinstance(name, str):
            raise _wrong(field, "a parameter's name", name)
        if (key, name) in found:
            raise ValueError(f"this state has the {key} of parameter {name!r} twice in its entries")
        found[key, name] = tuple(require_count(field, size) for size in _sequence(field, shape))
    return found


def _memory(memory: object, world_size: int) -> tuple[dict[int, States], int]:
    """Return the tensors of each rank, and the number of shards that the ranks' names tell."""
    found: dict[int, States] = {}
    num_shards = 1
    for owner, states in _mapping("memory", memory).items():
        parsed = parse_name(owner)
        if not found and parsed is not None:
            num_shards = parsed[1]
        if parsed is None or parsed[0] >= world_size or parsed[1] != num_shards or world_size % num_shards:
            raise ValueError(
                f"this state was saved on {world_size} ranks, and has the memory of {owner!r:.80}"
            )
        for key, tensors in _mapping(owner, states).items():
            dtype = _require_state_key(owner, key)
            for name, tensor in require_tensors(key, tensors).items():
                if tensor.dtype != dtype:
                    raise ValueError(
                        f"the {key} of parameter {name!r:.80} of {owner} is a tensor of {tensor.dtype}"
                    )
        found[parsed[0]] = states
    return found, num_shards


def _require_state_key(field: str, key: object) -> torch.dtype:
    """Return the dtype in the key of a state, such as ``"residual:float32"``; ValueError if it is no key."""
    name, _, dtype = key.rpartition(":") if isinstance(key, str) else ("", "", "")
    if not name:
        raise _wrong(field, "a state's name and dtype, such as 'residual:float32'", key)
    return dtype_named(dtype)


def _loss_scale(value: object) -> float | None:
    if value is None:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    try:
        scale = float(number)
    except OverflowError:
        scale = math.inf
    if not 0 < scale < math.inf:
        raise _wrong("loss_scale", "None or a positive number", value)
    return scale


def _sequence(field: str, value: object, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
        raise _wrong(field, "a list" if length is None else f"a list of {length}", value)
    return value


def _mapping(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(field, "a mapping from names", value)
    return value


def _wrong(field: str, wanted: str, value: object) -> ValueError:
    shown = f"a {type(value).__name__}" if isinstance(value, Tensor | Mapping) else f"{value!r:.80}"
    return ValueError(
        f"this is no state of a wire: its {field} must be {wanted}, not {shown}; load an undamaged checkpoint"
    )


def _require_keys(state: Mapping[str, Any]) -> None:
    # The version comes first, since a state of another version has other keys.
    version = require_count("version", state.get("version", VERSION))
    if version != VERSION:
        raise ValueError(
            f"this state has version {version}, and this gradwire reads version {VERSION}; "
            "load it with the gradwire that saved it"
        )
    for key in KEYS:
        if key not in state:
            raise ValueError(f"this is no state of a wire: it has no {key!r}")
    for key in state:
        if key not in (*KEYS, *OPTIONAL_KEYS):
            raise ValueError(f"this is no state of a wire: it has an unknown {key!r:.80}")
