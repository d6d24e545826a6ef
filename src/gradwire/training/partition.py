"""The division of a model's parameters into fragments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

Order = Literal["strided", "consecutive"]
"""The layers that share a fragment: those a stride apart, or neighbours."""


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its name up to the first number, or else the module that holds it.

    >>> layer_of("decoder.layers.3.mlp.0.weight"), layer_of("embedding.weight"), layer_of("scale")
    ('decoder.layers.3', 'embedding', 'scale')
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1] or parts)


def count_layers(names: Iterable[str]) -> int:
    """Return the number of layers, and so of fragments at most, of a model with parameters of these names.

    >>> count_layers(["embedding.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight"])
    3
    """
    return len(set(map(layer_of, names)))


def divide(
    numels: Mapping[str, int], fragments: int | Sequence[Sequence[str]], order: Order = "strided"
) -> list[list[str]]:
    """Return the names of each fragment's parameters, in the order of ``numels``.

    Args:
        numels: the number of values of each parameter, by name, in the model's order.
        fragments: the number of fragments, or each fragment's patterns.
        order: the layers that share a fragment; ignored for patterns.

    Raises ValueError if a parameter matches no pattern, if a fragment would be empty, or if there are fewer
    layers than fragments.

    >>> divide({"a.weight": 4, "b.0.weight": 4, "b.1.weight": 4, "b.1.bias": 1}, 2)
    [['b.1.weight', 'b.1.bias'], ['a.weight', 'b.0.weight']]
    """
    if not isinstance(fragments, int):
        return _by_patterns(list(numels), fragments)
    layers: dict[str, int] = {}
    for name, numel in numels.items():
        layers[layer_of(name)] = layers.get(layer_of(name), 0) + numel
    if len(layers) < fragments:
        raise ValueError(
            f"the model has {len(layers)} layers ({', '.join(list(layers)[:5])}), too few for {fragments} "
            "fragments: give fewer, or patterns of names"
        )
    number_of = _strided(layers, fragments) if order == "strided" else _consecutive(layers, fragments)
    return [[name for name in numels if number_of[layer_of(name)] == number] for number in range(fragments)]


def _by_patterns(names: Sequence[str], fragments: Sequence[Sequence[str]]) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in fragments]
    for name in names:
        for own, patterns in zip(found, fragments, strict=True):
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                own.append(name)
                break
        else:
            raise ValueError(f"parameter {name!r} is in no fragment: add a pattern for it, or a last one '*'")
    for own, patterns in zip(found, fragments, strict=True):
        if not own:
            raise ValueError(f"the fragment {list(patterns)} has no parameter: leave it out, or reorder")
    return found


def _strided(layers: Mapping[str, int], num_fragments: int) -> dict[str, int]:
    """Give each layer, the largest first, to the fragment with the fewest values: equal layers take turns."""
    sizes = [0] * num_fragments
    number_of = {}
    for layer in sorted(layers, key=lambda layer: -layers[layer]):
        number = sizes.index(min(sizes))
        sizes[number] += layers[layer]
        number_of[layer] = number
    return number_of


def _consecutive(layers: Mapping[str, int], num_fragments: int) -> dict[str, int]:
    """Cut the layers where the values before the cut are nearest to the fragment's share."""
    before = [0, *itertools.accumulate(layers.values())]
    cuts = [0]
    for number in range(1, num_fragments):
        share = before[-1] * number / num_fragments
        allowed = range(cuts[-1] + 1, len(layers) - (num_fragments - number) + 1)
        cuts.append(min(allowed, key=lambda cut: abs(before[cut] - share)))
    return {layer: sum(i >= cut for cut in cuts) - 1 for i, layer in enumerate(layers)}
