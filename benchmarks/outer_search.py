"""Find the learning rates of DiLoCo: train with each of a grid, and print the losses, best first.

    python benchmarks/outer_search.py --period 10                    the small setting, minutes on 2 cores
    python benchmarks/outer_search.py --period 40 --setting real     one GPU; start it several times at once
    python benchmarks/outer_search.py --period 40 --lr 0.5 0.7 --momentum 0.6 --inner 5e-4 1e-3

Other options are those of convergence.py, which trains and keeps the rows. With one seed, losses that are
less than 0.3 % apart are alike.
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path

import convergence
from runs import by_recipe, read


def names(options: argparse.Namespace) -> list[str]:
    """Return a row's name for each point of the grid."""
    grid = itertools.product(options.lr, options.momentum, options.inner or [None])
    found = []
    for lr, momentum, inner in grid:
        name = f"DiLoCo:period={options.period},lr={lr:g},momentum={momentum:g}"
        name += "" if inner is None else f",inner={inner:g}"
        found.append(name + (f",{options.more}" if options.more else ""))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--period", type=int, required=True)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.5, 0.7, 1.0], help="outer learning rates")
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.0, 0.5, 0.8, 0.9])
    parser.add_argument("--inner", type=float, nargs="+", help="peaks of the inner rate; else the setting's")
    parser.add_argument("--more", help="further options of the rows: fragments=4,delay=2,recipe=int4")
    parser.add_argument("--out", type=Path, default=Path("outer-search"))
    options, others = parser.parse_known_args()
    chosen = names(options)
    common = ["--seeds", "0"] if "--seeds" not in others else []
    code = convergence.main(["--recipes", *chosen, "--out", str(options.out), *common, *others])
    for path in sorted(options.out.glob("*.csv")):
        runs = {name: own for name, own in by_recipe(read(path)).items() if name in chosen}
        losses = {name: statistics.mean(run.loss for run in own) for name, own in runs.items()}
        print(path)
        for name in sorted(losses, key=lambda name: losses[name]):
            print(f"{losses[name]:8.4f}  {name}")
    return code


if __name__ == "__main__":
    sys.exit(main())
