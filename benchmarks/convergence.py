"""Train the same model, on the same data and seeds, with every recipe, and compare losses.

    python benchmarks/convergence.py --setting small              minutes on 2 cores
    python benchmarks/convergence.py --setting vision             a convolutional network, on 2 cores
    python benchmarks/convergence.py --setting real --minutes 8   one GPU; repeat it until all rows are there
    python benchmarks/convergence.py --optimizer sgd              the small setting, in small-sgd.csv
    python benchmarks/convergence.py --table convergence/small.csv
    python benchmarks/convergence.py --plot convergence/small.csv fidelity.svg --link 1gbit
    python benchmarks/convergence.py --front convergence/small.csv longer/small.csv front.svg

The model, the text and the schedule are those of examples/train_lm.py; the convolutional network and its data
are those of images.py. Workers are virtual ranks. Each recipe and seed becomes one row of a CSV file. You may
end the command at any time and run it again: it skips finished rows, and resumes the first unfinished one
from where it was saved, with the same bits. With --minutes it ends by itself and saves its last step. Several
processes may share a folder: each takes rows that no other has begun. Rows of local SGD are called
LocalSGD:period=N or DiLoCo:period=N; see local_rows.py.

Exit codes: 0 every row is there; 3 some are missing, run it again; 2 wrong arguments.
"""

import argparse
import dataclasses
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import Progress, TaskID, TextColumn

import gradwire
import local_rows
from curves import draw, table
from front_drawing import draw_front
from gradwire.headroom import Machine
from gradwire.recipes import require_averaging
from local_trainer import LocalTrainer
from optimizers import OPTIMIZERS, require_sgd
from rows import Row, Taken
from runs import Run, Setting, append, read
from tasks import Data, data_of
from trainer import Trainer

RECIPES = [
    "fp32",
    "bf16",
    "int8",
    "fp8",
    "int4",
    "int4:feedback=false",
    "int4:feedback=false,rotated=true",
    "int3",
    "int2",
    "int2:bits=1+2",
    "sign",
    "sign:rotated=false",
    "powersgd",
    "powersgd:rank=4",
    "powersgd:rank=1",
    "acp",
    "LocalSGD:period=10",
    "DiLoCo:period=10",
]
SETTINGS = {
    "small": Setting(4, 300, 96, 3, 64, 4, 3e-3),
    # 25.6 million parameters. A worker's batch of 2048 bytes keeps the GPU busy for about 2 ms.
    "real": Setting(4, 2000, 512, 8, 256, 8, 1e-3),
    "vision": Setting(4, 300, 16, 1, 16, 8, 3e-3, data="images"),
}
# What options of the command may change in a setting, with its type.
CHANGEABLE = {field.name: field.type for field in dataclasses.fields(Setting) if field.name != "data"}
# For optimizers other than the setting's own: fp32's best of 0.01, 0.03, 0.1, 0.3 and 1 in both settings.
LEARNING_RATES = {"sgd": 0.1}
NUM_EVALUATIONS = 10
NUM_HELD_OUT = {"small": 256, "real": 1024, "vision": 1024}
"""Number of pieces of text, or of images, that are held out; the same for all recipes."""


VERSIONS = f"torch {torch.__version__}, Python {platform.python_version()}"


class OutOfTime(Exception):
    """Raised when a run is saved before its last step."""


def train(
    row: Row,
    data: tuple[Data, Data],
    num_held_out: int,
    deadline: float,
    tell: Callable[[int, float], None],
    eager: bool,
) -> Run:
    """Train a row, from where it was saved; raise OutOfTime at the deadline."""
    setting = row.setting
    kind = Trainer if local_rows.parse(row.recipe) is None else LocalTrainer
    trainer = kind(setting, row.recipe, row.seed, data, eager)
    seconds_before, curve = 0.0, {}
    if row.saved.exists():
        state = torch.load(row.saved, weights_only=True, map_location=data[0].device)
        trainer.load_state_dict(state["trainer"])
        seconds_before, curve = state["seconds"], state["curve"]
    curve = curve or {0: trainer.evaluate(num_held_out)}
    every = max(1, setting.steps // NUM_EVALUATIONS)
    begin = time.monotonic()

    def seconds() -> float:
        return seconds_before + time.monotonic() - begin

    def save() -> None:
        half_written = row.saved.with_suffix(".part")
        torch.save({"trainer": trainer.state_dict(), "seconds": seconds(), "curve": curve}, half_written)
        half_written.replace(row.saved)

    while (done := trainer.num_steps) < setting.steps:
        if time.monotonic() > deadline:
            save()
            raise OutOfTime(f"{row} is saved after {done} of {setting.steps} steps")
        trainer.step()
        done += 1
        if done % every == 0 or done == setting.steps:
            curve[done] = trainer.evaluate(num_held_out)
            if trainer.saves_on_the_way:
                save()
        tell(done, list(curve.values())[-1])
    return Run(
        recipe=row.recipe,
        seed=row.seed,
        setting=setting,
        num_parameters=sum(p.numel() for p in trainer.model.parameters()),
        bytes_per_step=trainer.bytes_sent / setting.steps,
        seconds=seconds(),
        curve=curve,
        machine=torch.cuda.get_device_name() if data[0].device.type == "cuda" else str(Machine.here()),
        versions=VERSIONS,
    )


def chosen_recipes(names: list[str]) -> list[str]:
    """Return each recipe once, as it prints; raise ValueError if one is invalid or does not average."""
    chosen = []
    for name in names:
        if local_rows.parse(name) is not None:
            chosen.append(name)
            continue
        recipe = gradwire.recipe(name)
        require_averaging(recipe, "workers that share one model cannot be trained by it")
        chosen.append(str(recipe))
    return list(dict.fromkeys(chosen))


def chosen_runs(paths: list[Path], recipes: list[str] | None) -> list[Run]:
    """Return the runs of some recipes, or of all; raise ValueError if a recipe has none."""
    runs = [run for path in paths for run in read(path)]
    if recipes is None:
        return runs
    if missing := sorted({*recipes} - {run.recipe for run in runs}):
        raise ValueError(f"{', '.join(map(str, paths))}: no runs of {', '.join(missing)}")
    return [run for run in runs if run.recipe in recipes]


def file_name(name: str, optimizer: str) -> str:
    """Return the name of a setting's CSV file, with the optimizer's if it is not AdamW."""
    return f"{name}.csv" if optimizer == "adamw" else f"{name}-{optimizer}.csv"


def read_own(path: Path, setting: Setting) -> list[Run]:
    """Return the rows that exist; raise ValueError if new rows would not compare with them."""
    runs = read(path) if path.exists() else []
    for run in runs:
        if run.setting != setting:
            raise ValueError(f"{path} has rows of another setting, {run.setting}; give another --out")
        if run.versions != VERSIONS:
            raise ValueError(
                f"{path} has rows of {run.versions}, and this is {VERSIONS}: another torch, or another "
                "standard library to train on; give another --out"
            )
    return runs


def chosen_setting(options: argparse.Namespace) -> Setting:
    given = {name: getattr(options, name) for name in CHANGEABLE}
    changes = {name: value for name, value in given.items() if value is not None}
    setting = SETTINGS[options.setting]
    if options.optimizer not in (None, setting.optimizer) and options.lr is None:
        changes["lr"] = LEARNING_RATES[options.optimizer]
    return dataclasses.replace(setting, **changes)


def chosen_device(options: argparse.Namespace) -> torch.device:
    device = torch.device(options.device or ("cuda" if options.setting == "real" else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here that torch can use; give --device cpu")
    return device


def chosen_rows(options: argparse.Namespace, setting: Setting) -> list[Row]:
    """Return the rows to train, seed by seed: unfinished, they still have all recipes."""
    recipes = chosen_recipes(options.recipes or RECIPES)
    for name in recipes:
        if local_rows.parse(name) is None:
            require_sgd(setting.optimizer, gradwire.recipe(name))
    seeds = dict.fromkeys(options.seeds)
    return [Row(setting, recipe, seed, options.out) for seed in seeds for recipe in recipes]


def run_all(rows: list[Row], path: Path, device: torch.device, options: argparse.Namespace) -> int:
    if device.type == "cpu":
        torch.set_num_threads(1)  # a model this small is no faster with more, and slower on busy cores
    deadline = time.monotonic() + 60 * options.minutes
    data = data_of(rows[0].setting, device)
    num_held_out, num_taken = NUM_HELD_OUT[options.setting], 0

    def is_there(row: Row) -> bool:
        return any((run.recipe, run.seed) == (row.recipe, row.seed) for run in read_own(path, row.setting))

    columns = (*Progress.get_default_columns(), TextColumn("held-out loss {task.fields[loss]:.4f}"))
    with Progress(*columns) as progress:
        for row in [row for row in rows if not is_there(row)]:
            bar = progress.add_task(str(row), total=row.setting.steps, loss=float("nan"))

            def tell(done: int, loss: float, bar: TaskID = bar) -> None:
                progress.update(bar, completed=done, loss=loss)

            try:
                with row.claimed():
                    if is_there(row):  # another process has trained it meanwhile
                        continue
                    run = train(row, data, num_held_out, deadline, tell, options.eager)
                    append(path, run)
                    row.saved.unlink(missing_ok=True)
            except OutOfTime as reason:
                progress.print(f"{reason}: run this again")
                return 3
            except Taken as reason:
                progress.remove_task(bar)
                progress.print(f"{reason}: left to it")
                num_taken += 1
                continue
            progress.print(f"{row}: {run.loss:.4f} after {run.seconds:.0f} s")
    if num_taken:
        print(f"{num_taken} of {len(rows)} rows were left to other processes: run this again to see them")
        return 3
    print(f"all {len(rows)} rows are in {path}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--recipes", nargs="+", help="to train, or to draw; by default a choice, or all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("convergence"), help="folder of the CSV file")
    parser.add_argument("--minutes", type=float, default=1e6, help="longest time to run")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda for real, cpu for others")
    parser.add_argument("--eager", action="store_true", help="do not use a CUDA graph")
    for name, kind in CHANGEABLE.items():
        choices = list(OPTIMIZERS) if name == "optimizer" else None
        parser.add_argument(f"--{name}", type=kind, choices=choices, help="by default the setting's own")
    parser.add_argument("--table", type=Path, metavar="CSV", help="print a table of the rows in a file")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("CSV", "SVG"), help="draw the rows of a file")
    parser.add_argument(
        "--front",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="CSV files, then an SVG to draw: bytes and gaps of their rows",
    )
    parser.add_argument("--link", default="1gbit", help="rate of each worker's link, for the plot over time")
    options = parser.parse_args(arguments)
    try:
        if options.table:
            print(table(read(options.table)))
        if options.plot:
            source, drawing = options.plot
            drawing.write_text(draw(chosen_runs([source], options.recipes), options.link))
        if options.front:
            *sources, drawing = options.front
            if not sources:
                raise ValueError("--front needs a CSV file, or several, and the SVG to draw")
            drawing.write_text(draw_front(chosen_runs(sources, options.recipes)))
        if options.table or options.plot or options.front:
            return 0
        setting, device = chosen_setting(options), chosen_device(options)
        rows = chosen_rows(options, setting)
        path = options.out / file_name(options.setting, setting.optimizer)
        read_own(path, setting)
    except (ValueError, OSError) as reason:
        parser.error(str(reason))
    return run_all(rows, path, device, options)


if __name__ == "__main__":
    sys.exit(main())
