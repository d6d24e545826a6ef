"""Compare each recipe's averaged gradient with the true mean, some steps into training.

    python benchmarks/alignment.py --recipes sign sign:feedback=true int4

Prints the length of the averaged gradient over that of the true mean, and the cosine between the two, in the
small setting of convergence.py. The last columns have the share of the true mean's energy that signs and one
mean magnitude per parameter keep: for embeddings and output layers (tables), vectors, and other matrices.
"""

import argparse
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from convergence import SETTINGS
from gradwire.recipes.resolution import table_names
from tasks import Data, data_of
from trainer import Trainer

DEFAULTS = ["int8", "int4", "sign", "sign:tables=same", "sign:feedback=true,tables=same", "powersgd"]
KINDS = ("tables", "vectors", "matrices")


@dataclass(frozen=True)
class Alignment:
    """A recipe's averaged gradient against the true mean, in one step."""

    length: float
    cosine: float
    one_bit: dict[str, float]
    """Energy kept, by kind of parameter: (sum of magnitudes)^2 / n over the sum of squares."""


def alignment(recipe: str, num_steps: int, data: tuple[Data, Data]) -> Alignment:
    """Train with a recipe, and compare its last averaged gradient with the true mean."""
    trainer = Trainer(SETTINGS["small"], recipe, 0, data, eager=True)
    ranks = trainer.ranks
    for _ in range(num_steps - 1):
        trainer.step()
    for rank in range(ranks.world_size):
        with ranks.backward_of(rank):
            trainer.backward(trainer.places[num_steps - 1, rank])
    everyone = [ranks.gradients(rank) for rank in range(ranks.world_size)]
    means = {name: torch.stack([own[name] for own in everyone]).mean(dim=0) for name in everyone[0]}
    ranks.average()
    mean, made = (torch.cat([g.flatten() for g in each.values()]) for each in (means, ranks.gradients(0)))
    cosine = float(torch.cosine_similarity(made, mean, dim=0))
    return Alignment(float(made.norm() / mean.norm()), cosine, one_bit(means, table_names(trainer.model)))


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
    print(
        f"{'step ' + str(options.steps):32} {'length':>8} {'cosine':>8} {''.join(f'{k:>10}' for k in KINDS)}"
    )
    for recipe in options.recipes:
        found = alignment(recipe, options.steps, data)
        shares = "".join(f"{found.one_bit[kind]:10.2f}" for kind in KINDS)
        print(f"{recipe:32} {found.length:8.2f} {found.cosine:8.3f} {shares}")


if __name__ == "__main__":
    main()
