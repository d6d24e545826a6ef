"""Compare each recipe's averaged gradient with the true mean, some steps into training.

    python benchmarks/alignment.py --recipes sign sign:feedback=true int4

Prints the length of the averaged gradient over that of the true mean, the cosine between the two, and the
relative error in two senses, in the small setting of convergence.py: that of the whole gradient, and the root
mean square, over all values, of the error of a value's parameter. The last columns have the share of the true
mean's energy that signs and one mean magnitude per parameter keep: for embeddings and output layers (tables),
vectors, and other matrices.
"""

import argparse
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from convergence import SETTINGS
from gradwire.recipes import table_names
from tasks import Data, data_of
from trainer import Trainer

DEFAULTS = [
    "int8",
    "int4",
    "sign",
    "sign:rotated=false",
    "sign:tables=same,rotated=false",
    "sign:feedback=true,tables=same,rotated=false",
    "powersgd",
]
KINDS = ("tables", "vectors", "matrices")


@dataclass(frozen=True)
class Alignment:
    """A recipe's averaged gradient against the true mean, in one step."""

    length: float
    cosine: float
    error: float
    """Relative error of the whole gradient."""
    error_of_values: float
    """Root mean square over all values of the relative error of their parameter."""
    one_bit: dict[str, float]
    """Energy kept, by kind of parameter: (sum of magnitudes)^2 / n over the sum of squares."""


def alignment(recipe: str, num_steps: int, data: tuple[Data, Data]) -> Alignment:
    """Train with a recipe, and compare its last averaged gradient with the true mean."""
    trainer = Trainer(SETTINGS["small"], recipe, 0, data, eager=True)
    ranks = trainer.ranks
    for _ in range(num_steps - 1):
        trainer.step()
    trainer.backward(num_steps - 1)
    everyone = [ranks.gradients(rank) for rank in range(ranks.world_size)]
    means = {name: torch.stack([own[name] for own in everyone]).mean(dim=0) for name in everyone[0]}
    ranks.average()
    own = ranks.gradients(0)
    mean, made = (torch.cat([g.flatten() for g in each.values()]) for each in (means, own))
    squares = sum(
        exact.numel() * float((own[name] - exact).square().sum() / exact.square().sum())
        for name, exact in means.items()
    )
    return Alignment(
        length=float(made.norm() / mean.norm()),
        cosine=float(torch.cosine_similarity(made, mean, dim=0)),
        error=float((made - mean).norm() / mean.norm()),
        error_of_values=math.sqrt(squares / mean.numel()),
        one_bit=one_bit(means, table_names(trainer.model)),
    )


def one_bit(gradients: dict[str, Tensor], tables: Collection[str]) -> dict[str, float]:
    """Return the share of energy that signs and a mean magnitude keep, by kind of parameter."""
    held, whole = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    for name, gradient in gradients.items():
        kind = "tables" if name in tables else "vectors" if gradient.dim() < 2 else "matrices"
        held[kind] += float(gradient.abs().sum() ** 2 / gradient.numel())
        whole[kind] += float(gradient.square().sum())
    return {kind: held[kind] / whole[kind] for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=DEFAULTS)
    parser.add_argument("--steps", type=int, default=26)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = data_of(SETTINGS["small"], torch.device("cpu"))
    titles = "".join(f"{title:>10}" for title in ("length", "cosine", "error", "of values", *KINDS))
    print(f"{'step ' + str(options.steps):44} {titles}")
    for recipe in options.recipes:
        found = alignment(recipe, options.steps, data)
        figures = (found.length, found.cosine, found.error, found.error_of_values, *found.one_bit.values())
        print(f"{recipe:44} {''.join(f'{figure:10.3f}' for figure in figures)}")


if __name__ == "__main__":
    main()
