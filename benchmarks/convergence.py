"""Does it train as well? The same language model, data and seeds with every recipe, over virtual workers.

    python benchmarks/convergence.py --setting small              minutes on 2 cores
    python benchmarks/convergence.py --setting real --minutes 8   one GPU; again and again until all is there
    python benchmarks/convergence.py --optimizer sgd              the small setting, in small-sgd.csv
    python benchmarks/convergence.py --table convergence/small.csv
    python benchmarks/convergence.py --plot convergence/small.csv fidelity.svg --link 1gbit

The model, the text and the schedule are those of examples/train_lm.py. Each recipe and seed becomes one row
of a CSV file; what has a row is not run again, so it may be ended at any time, and goes on with the first row
that is missing, from the last evaluation of its loss on, with the same bits as if it had not been ended. With
--minutes, it ends by itself and saves its last step. Exit code 0: every row is there; 3: run it again.
"""

import argparse
import dataclasses
import hashlib
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import Progress, TaskID, TextColumn
from torch import Tensor

import gradwire
import replicas
from curves import Run, Setting, append, draw, read, table
from gradwire.headroom import Machine
from optimizers import OPTIMIZERS
from trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from lm import corpus

RECIPES = [
    "fp32",
    "bf16",
    "int8",
    "fp8",
    "int4",
    "int4:feedback=false",
    "sign",
    "sign:feedback=true",
    "powersgd",
    "powersgd:rank=4",
    "powersgd:rank=1",
    "acp",
    "LocalSGD:period=10",
    "DiLoCo:period=10",
]
SETTINGS = {
    "small": Setting(4, 300, 96, 3, 64, 4, 3e-3),
    # 25.5 million parameters. A worker's batch of 2048 bytes keeps the GPU busy for about 2 ms.
    "real": Setting(4, 2000, 512, 8, 256, 8, 1e-3),
}
# For an optimizer that is not the setting's own; fp32's best of 0.01, 0.03, 0.1, 0.3 and 1 in both settings.
LEARNING_RATES = {"sgd": 0.1}
NUM_EVALUATIONS = 10
NUM_HELD_OUT = {"small": 256, "real": 1024}
"""Pieces of held-out text, the same for all."""


class OutOfTime(Exception):
    """A run was ended before its last step, and saved."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What is to become a row: a recipe with a seed, and where its run is saved until it is done."""

    setting: Setting
    recipe: str
    seed: int
    folder: Path

    @property
    def saved(self) -> Path:
        of = hashlib.sha256(repr((self.setting, self.recipe, self.seed)).encode()).hexdigest()
        return self.folder / f"unfinished-{of[:16]}.pt"


def train(
    row: Row,
    texts: tuple[Tensor, Tensor],
    num_held_out: int,
    deadline: float,
    tell: Callable[[int, float], None],
    eager: bool,
) -> Run:
    """Train once, from where an earlier run was saved; raise OutOfTime at the deadline."""
    setting = row.setting
    trainer = Trainer(setting, row.recipe, row.seed, texts, eager)
    seconds_before, curve = 0.0, {}
    if row.saved.exists():
        state = torch.load(row.saved, weights_only=True, map_location=texts[0].device)
        trainer.load_state_dict(state["trainer"])
        seconds_before, curve = state["seconds"], state["curve"]
    curve = curve or {0: trainer.evaluate(num_held_out)}
    every = max(1, setting.steps // NUM_EVALUATIONS)
    begin = time.monotonic()

    def seconds() -> float:
        return seconds_before + time.monotonic() - begin

    def save() -> None:
        row.folder.mkdir(parents=True, exist_ok=True)
        half_written = row.saved.with_suffix(".part")
        torch.save({"trainer": trainer.state_dict(), "seconds": seconds(), "curve": curve}, half_written)
        half_written.replace(row.saved)

    while (done := trainer.ranks.num_steps) < setting.steps:
        if time.monotonic() > deadline:
            save()
            raise OutOfTime(f"{row.recipe}, seed {row.seed} is saved after {done} of {setting.steps} steps")
        trainer.step()
        done += 1
        if done % every == 0 or done == setting.steps:
            curve[done] = trainer.evaluate(num_held_out)
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
        machine=torch.cuda.get_device_name() if texts[0].is_cuda else str(Machine.here()),
        versions=f"torch {torch.__version__}, Python {platform.python_version()}",
    )


def train_replicas(
    setting: Setting, name: str, seed: int, num_held_out: int, tell: Callable[[int, float], None]
) -> Run:
    """A row of local SGD, whose workers are processes, on CPU."""
    every = max(1, setting.steps // NUM_EVALUATIONS)
    curve, sent, num_parameters, seconds = replicas.train(setting, name, seed, num_held_out, every, tell)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return Run(name, seed, setting, num_parameters, sent, seconds, curve, str(Machine.here()), versions)


def chosen_recipes(names: list[str]) -> list[str]:
    known = []
    for name in names:
        if replicas.period_of(name):
            known.append(name)
        elif name.partition(":")[0] in gradwire.RECIPES or name.startswith(("route(", "schedule(")):
            known.append(str(gradwire.recipe(name)))
        else:
            print(f"there is no recipe {name}: skipped")
    return known


def chosen_runs(path: Path, recipes: list[str] | None) -> list[Run]:
    """Those of some recipes, or all; ValueError if one of the recipes has none."""
    runs = read(path)
    if missing := sorted({*(recipes or [])} - {run.recipe for run in runs}):
        raise ValueError(f"{path} has no runs of {', '.join(missing)}")
    return [run for run in runs if recipes is None or run.recipe in recipes]


def file_name(name: str, optimizer: str) -> str:
    """The CSV file of a setting: its name, and that of the optimizer if it is not the example's."""
    return f"{name}.csv" if optimizer == "adamw" else f"{name}-{optimizer}.csv"


def run_all(options: argparse.Namespace, setting: Setting) -> int:
    path = options.out / file_name(options.setting, setting.optimizer)
    runs = read(path) if path.exists() else []
    if any(run.setting != setting for run in runs):
        raise SystemExit(f"{path} has rows of another setting, {runs[0].setting}; give another --out")
    device = torch.device(options.device or ("cuda" if options.setting == "real" else "cpu"))
    if device.type == "cpu":
        torch.set_num_threads(1)  # so small a model gains nothing from more, and loses where cores are busy
    deadline = time.monotonic() + 60 * options.minutes
    recipes = chosen_recipes(options.recipes or RECIPES)
    wanted = [(recipe, seed) for seed in options.seeds for recipe in recipes]
    missing = [pair for pair in wanted if pair not in {(run.recipe, run.seed) for run in runs}]
    texts = tuple(text.to(device) for text in corpus())
    columns = (*Progress.get_default_columns(), TextColumn("held-out loss {task.fields[loss]:.4f}"))
    with Progress(*columns) as progress:
        for recipe, seed in missing:
            bar = progress.add_task(f"{recipe}, seed {seed}", total=setting.steps, loss=float("nan"))

            def tell(done: int, loss: float, bar: TaskID = bar) -> None:
                progress.update(bar, completed=done, loss=loss)

            row, num_held_out = Row(setting, recipe, seed, options.out), NUM_HELD_OUT[options.setting]
            if replicas.period_of(recipe):
                if device.type != "cpu":
                    progress.print(f"{recipe} is trained by processes on CPU, not on {device}: skipped")
                    continue
                append(path, train_replicas(setting, recipe, seed, num_held_out, tell))
                continue
            try:
                run = train(row, (texts[0], texts[1]), num_held_out, deadline, tell, options.eager)
            except OutOfTime as reason:
                progress.print(f"{reason}: run this again")
                return 3
            append(path, run)
            row.saved.unlink()
            progress.print(f"{recipe}, seed {seed}: {run.loss:.4f} after {run.seconds:.0f} s")
    print(f"all {len(wanted)} rows are in {path}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--recipes", nargs="+", help="which to train, or to draw; by default many, or all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("convergence"), help="the folder of the CSV file")
    parser.add_argument("--minutes", type=float, default=1e6, help="how long to run, at most")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cpu if small, cuda if real")
    parser.add_argument("--eager", action="store_true", help="without a CUDA graph")
    for field in dataclasses.fields(Setting):
        choices = list(OPTIMIZERS) if field.name == "optimizer" else None
        parser.add_argument(
            f"--{field.name}", type=field.type, choices=choices, help="by default as the setting has it"
        )
    parser.add_argument("--table", type=Path, metavar="CSV", help="print a table of what is there")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("CSV", "SVG"), help="draw what is there")
    parser.add_argument("--link", default="1gbit", help="of each worker, for the plot against time")
    options = parser.parse_args(arguments)
    try:
        if options.table:
            print(table(read(options.table)))
        if options.plot:
            source, drawing = options.plot
            drawing.write_text(draw(chosen_runs(source, options.recipes), options.link))
    except ValueError as reason:
        parser.error(str(reason))
    if options.table or options.plot:
        return 0
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Setting)}
    changes = {name: value for name, value in given.items() if value is not None}
    setting = SETTINGS[options.setting]
    if options.optimizer not in (None, setting.optimizer) and options.lr is None:
        changes["lr"] = LEARNING_RATES[options.optimizer]
    return run_all(options, dataclasses.replace(setting, **changes))


if __name__ == "__main__":
    sys.exit(main())
