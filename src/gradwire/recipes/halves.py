"""The recipes of a reduce-scatter and of an all-gather, made from those of an average."""

from __future__ import annotations

import functools
from dataclasses import replace

from gradwire.codecs import Top
from gradwire.exchanges import Exchange, Gathered, Hierarchical, LowRank, Noop, Scattered, TwoShot
from gradwire.recipes.composed import map_leaves
from gradwire.recipes.registry import parse_spec
from gradwire.recipes.value import Recipe


@functools.lru_cache(64)
def scattered(whole: Recipe) -> Recipe:
    """Return the recipe that sums each rank's chunk alone, with the encodings of ``whole``.

    Chunks go to their owners in one level, whatever the nodes are, and without residuals. Raises ValueError
    for low rank, and for a recipe that asks for residuals.

    >>> from gradwire.recipes.factories import int4
    >>> scattered(int4()).exchange
    Scattered(codec=Blocks(kind='int4', block=128, stochastic=False), seed=0)
    """
    return map_leaves(whole, functools.partial(_half, Scattered, "a reduce-scatter"))


def can_scatter(whole: Recipe) -> bool:
    """Return True if a recipe can do a reduce-scatter."""
    try:
        scattered(whole)
    except ValueError:
        return False
    return True


@functools.lru_cache(64)
def gathered(whole: Recipe) -> Recipe:
    """Return the recipe that sends each rank's chunk to all others, with the encodings of ``whole``.

    Raises ValueError for low rank, for ``noop``, and for a recipe that asks for residuals.
    """
    return map_leaves(whole, functools.partial(_half, Gathered, "an all-gather"))


def _half(kind: type[Scattered] | type[Gathered], what: str, leaf: Recipe) -> Recipe:
    exchange = leaf.exchange
    if isinstance(exchange, LowRank):
        raise ValueError(
            f"recipe {leaf} cannot do {what}: its factors are of whole matrices, and each rank has a part of "
            "them alone. Use a recipe of values, such as int4, or average over replicas: see HSDP"
        )
    if isinstance(exchange, Noop):
        if kind is Gathered:
            raise ValueError(f"recipe {leaf} cannot do {what}: it sends nothing")
        return leaf
    if leaf.tuning is not None and kind is Scattered:
        _require_no_residuals(leaf, what)
        encodings = tuple((name, _scatter(_two_shot(own))) for name, own in leaf.tuning.encodings)
        tuning = replace(leaf.tuning, encodings=encodings)
        return replace(leaf, exchange=tuning.exchange(), tuning=tuning, local_size=1)
    two_shot = _two_shot(exchange)
    if two_shot is None:
        raise ValueError(f"recipe {leaf} cannot do {what}: use a recipe of one encoding, such as int8")
    if isinstance(two_shot.codec, Top):
        raise ValueError(
            f"recipe {leaf} cannot do {what}: most values would be lost, since it keeps no residuals. Use a "
            "recipe that sends every value, such as int4, or average over replicas: see HSDP"
        )
    _require_no_residuals(leaf, what)
    return replace(leaf, exchange=kind(two_shot.codec, two_shot.seed), local_size=1)


def _two_shot(exchange: Exchange) -> TwoShot | None:
    """Return the average of one encoding that an exchange is, or has between nodes; None if it is another."""
    inner = exchange.between if isinstance(exchange, Hierarchical) else exchange
    return inner if isinstance(inner, TwoShot) else None


def _scatter(two_shot: TwoShot | None) -> Scattered:
    assert two_shot is not None, "auto chooses from averages of one encoding"
    return Scattered(two_shot.codec, two_shot.seed)


def recipes_without_residuals(half: Recipe) -> tuple[str, ...]:
    """Return the names in a reduce-scatter's recipe that keep residuals in an average, by default.

    >>> from gradwire.recipes.factories import int4
    >>> recipes_without_residuals(scattered(int4()))
    ('int4',)
    """
    names = [leaf.name for leaf in half.leaves() if isinstance(leaf.exchange, Scattered)]
    return tuple(name for name in dict.fromkeys(names) if _keeps_residuals(name))


def _keeps_residuals(name: str) -> bool:
    """Return True if the average of this name keeps residuals."""
    factory, given = parse_spec(name) or (None, {})
    two_shot = None if factory is None else _two_shot(factory(**given).exchange)
    return two_shot is not None and two_shot.feedback is not None


def _require_no_residuals(leaf: Recipe, what: str) -> None:
    if _asks_for_residuals(leaf):
        raise ValueError(
            f"recipe {leaf} keeps residuals, and {what} keeps none: they would take as much memory on every "
            "rank as the whole gradients; leave feedback=, residual= and momentum= out"
        )


def _asks_for_residuals(leaf: Recipe) -> bool:
    """Return True if the recipe's text asks for residuals; a default that keeps them does not count.

    A recipe that the user made of an exchange has no defaults.
    """
    found = parse_spec(leaf.name)
    if found is None:
        two_shot = _two_shot(leaf.exchange)
        return two_shot is not None and two_shot.feedback is not None
    _, given = found
    return bool(given.get("feedback")) or "residual" in given or "momentum" in given
