"""Nodes of ranks: how many ranks a node has, and recipes that exchange in two levels for them."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from gradwire.exchanges import Hierarchical, TwoShot
from gradwire.ops import Family
from gradwire.peers import Claim, CollectiveCall
from gradwire.recipes.composed import map_leaves
from gradwire.recipes.registry import parse_spec, spec_with
from gradwire.recipes.value import Recipe

_MANY_RANKS = 32
# The variables in which torchrun and Open MPI give a rank the size of its node and its place there.
_LAUNCHERS = (
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def with_node_size(whole: Recipe, local_size: int) -> Recipe:
    """Return ``whole`` for nodes of ``local_size`` ranks; each recipe in it changes as it would alone.

    >>> from gradwire.recipes import schedule
    >>> print(with_node_size(schedule({0: "fp32", 9: "int4"}), local_size=8))
    schedule(0=fp32; 9=int4:local_size=8)
    """
    return map_leaves(whole, lambda leaf: _in_two_levels(leaf, local_size=local_size))


def placed(whole: Recipe, local_size: int, world_size: int) -> Recipe:
    """Return ``whole`` for ``world_size`` ranks in nodes of ``local_size``; its recipes change one by one.

    Many ranks without nodes become a grid: a rank of a grid of n by n exchanges messages with 2 (n - 1)
    others instead of n^2 - 1. That pays from 32 ranks on: see docs/performance.md.

    >>> from gradwire.recipes import recipe
    >>> print(placed(recipe("int8"), local_size=1, world_size=64))
    int8:local_size=8,within=same
    >>> print(placed(recipe("int8"), local_size=1, world_size=16))
    int8
    """
    if local_size > 1 or world_size < _MANY_RANKS:
        return with_node_size(whole, local_size)
    num_columns = _largest_divisor(world_size, math.isqrt(world_size))
    return map_leaves(whole, lambda leaf: _in_grid(leaf, num_columns))


def agree_on_nodes(recipe: Recipe, call: CollectiveCall, claim: Claim) -> Recipe:
    """Agree on ``claim`` with every rank, and return ``recipe`` for the node size that all ranks detect."""
    notes = call.agree(claim, note=str(detect_node_size(call.group)))
    return placed(recipe, common_node_size(notes), call.group.size())


def kernels_of(recipe: Recipe, group: dist.ProcessGroup) -> frozenset[Family]:
    """Return the kernels of ``recipe``, provided that all ranks detect the node size that this one does."""
    return placed(recipe, detect_node_size(group), group.size()).exchange.kernels


def require_nodes(recipe: Recipe, world_size: int) -> None:
    """Raise ValueError if the ranks cannot be divided into the recipe's nodes."""
    for each in recipe.leaves():
        if world_size % (each.local_size or 1):
            raise ValueError(
                f"recipe {each}: {world_size} ranks cannot be nodes of {each.local_size}; give a local_size "
                "that divides the number of ranks"
            )


def detect_node_size(group: dist.ProcessGroup) -> int:
    """Return the number of ranks in this rank's node, as its launcher gives it.

    Returns 1 if the launcher gives none, if all ranks are in one node, if nodes are not equal runs of
    consecutive ranks, or if the group is not the whole world.
    """
    size, rank = group.size(), group.rank()
    if not dist.is_initialized():
        return 1  # a group beside torch's world
    for names in _LAUNCHERS:
        texts = [os.environ.get(name, "") for name in names]
        if all(text.isdecimal() for text in texts):
            local_size, local_rank = map(int, texts)
            is_even = 0 < local_size < size == dist.get_world_size() and size % local_size == 0
            return local_size if is_even and local_rank == rank % local_size else 1
    return 1


def common_node_size(sizes: Iterable[str]) -> int:
    """Return the node size that all ranks have detected, or 1 if they differ.

    >>> common_node_size(["2", "2", "2", "2"]), common_node_size(["2", "1", "1", "2"])
    (2, 1)
    """
    distinct = set(sizes)
    return int(distinct.pop()) if len(distinct) == 1 else 1


def _in_grid(leaf: Recipe, num_columns: int) -> Recipe:
    """Return ``leaf`` for ranks in rows of ``num_columns``, with messages along rows encoded too.

    Returns the recipe itself if it cannot encode them, and where `_in_two_levels` does.
    """
    found = parse_spec(leaf.name)
    if found is not None and "within" not in inspect.signature(found[0]).parameters:
        return leaf
    return _in_two_levels(leaf, local_size=num_columns, within="same")


def _in_two_levels(leaf: Recipe, **options: Any) -> Recipe:
    """Return ``leaf`` with these options, ``local_size`` among them.

    Returns the recipe itself if its node size is given, or if its exchange cannot have two levels.
    """
    local_size: int = options["local_size"]
    if leaf.local_size is not None or local_size == 1:
        return leaf
    if not isinstance(leaf.exchange, TwoShot) and leaf.tuning is None:
        return leaf
    text = spec_with(leaf, **options)
    found = parse_spec(text)
    if found is None:  # a recipe that the user made of an exchange
        exchange = Hierarchical(leaf.exchange, local_size, "within" in options)  # type: ignore[arg-type]
        return replace(leaf, name=text, exchange=exchange, local_size=local_size)
    factory, arguments = found
    made = factory(**arguments)
    if made.tuning is None or leaf.tuning is None:
        return made
    return replace(made, tuning=replace(made.tuning, tables=leaf.tuning.tables))


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(limit, 0, -1) if number % divisor == 0)
