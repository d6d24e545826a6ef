"""How much of the true mean is in what each recipe makes of it, some steps into training.

    python benchmarks/alignment.py --recipes sign sign:feedback=true int4

Prints the length of the averaged gradient over that of the true mean, and the cosine between the two, in the
small setting of convergence.py.
"""

import argparse

import torch
from torch import Tensor

from convergence import SETTINGS, Trainer
from lm import corpus

DEFAULTS = ["int8", "int4", "sign", "sign:tables=same", "sign:feedback=true,tables=same", "powersgd"]


def alignment(recipe: str, num_steps: int, texts: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """The ratio of lengths, and the cosine, in the last of some steps."""
    trainer = Trainer(SETTINGS["small"], recipe, 0, texts, eager=True)
    ranks = trainer.ranks
    for step in range(num_steps - 1):
        trainer.step(step)
    for rank in range(ranks.world_size):
        with ranks.backward_of(rank):
            trainer.backward(trainer.starts[num_steps - 1, rank])
    everyone = [
        torch.cat([g.flatten() for g in ranks.gradients(r).values()]) for r in range(ranks.world_size)
    ]
    mean = torch.stack(everyone).mean(dim=0)
    ranks.average()
    made = torch.cat([g.flatten() for g in ranks.gradients(0).values()])
    return float(made.norm() / mean.norm()), float(torch.cosine_similarity(made, mean, dim=0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=DEFAULTS)
    parser.add_argument("--steps", type=int, default=26)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = corpus()
    print(f"{'step ' + str(options.steps):32} {'length':>8} {'cosine':>8}")
    for recipe in options.recipes:
        length, cosine = alignment(recipe, options.steps, texts)
        print(f"{recipe:32} {length:8.2f} {cosine:8.3f}")


if __name__ == "__main__":
    main()
