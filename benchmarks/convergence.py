"""Does it train as well? The same language model, data and seeds with every recipe, over virtual workers.

    python benchmarks/convergence.py --setting small              minutes on 2 cores
    python benchmarks/convergence.py --setting real --minutes 8   one GPU; again and again until all is there
    python benchmarks/convergence.py --optimizer sgd              the small setting, in small-sgd.csv
    python benchmarks/convergence.py --table convergence/small.csv
    python benchmarks/convergence.py --plot convergence/small.csv fidelity.svg --link 1gbit

The model, the text and the schedule are those of examples/train_lm.py. Each recipe and seed becomes one row
of a CSV file; what has a row is not run again, so it may be ended at any time, and goes on with the first row
that is missing. With --minutes, a row that would not be ready in time is given up after a few steps.
Exit code 0: every row is there; 3: run it again.
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
from torch import Tensor, nn

import gradwire
import replicas
from curves import Run, Setting, append, draw, read, table
from gradwire.headroom import Machine
from gradwire.testing import VirtualRanks
from optimizers import OPTIMIZERS

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from lm import LM, corpus, pieces, starts
from train_lm import learning_rate

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
    "powersgd:rank=1",
    "powersgd:rank=32,factors=int4",
    "acp",
    "LocalSGD:period=10",
    "DiLoCo:period=10",
]
SETTINGS = {
    "small": Setting(4, 300, 96, 3, 64, 4, 3e-3),
    # 25.5 million parameters. A worker's batch of 2048 bytes keeps the GPU busy for about 2 ms.
    "real": Setting(4, 2000, 512, 8, 256, 8, 1e-3),
}
# For an optimizer that is not the setting's own.
LEARNING_RATES = {("small", "sgd"): 0.1}
NUM_EVALUATIONS = 10
NUM_HELD_OUT = {"small": 256, "real": 1024}
"""Pieces of held-out text, the same for all."""
# How long a run takes is foreseen from a few steps, after those that compile kernels.
NUM_WARM_UP_STEPS, NUM_TIMED_STEPS = 10, 20
BUCKET_MB = 64.0


class OutOfTime(Exception):
    """A run would not be ready in time."""


class Trainer:
    """One model, trained by several workers with a recipe between them."""

    def __init__(
        self, setting: Setting, recipe: str, seed: int, texts: tuple[Tensor, Tensor], eager: bool
    ) -> None:
        self.text, self.held_out = texts
        self.device = self.text.device
        self.setting = setting
        torch.manual_seed(seed)
        self.model = LM(setting.width, setting.layers, setting.length).to(self.device)
        self.ranks = VirtualRanks(self.model, recipe, setting.workers, bucket_cap_mb=BUCKET_MB)
        self.optimizer = OPTIMIZERS[setting.optimizer](list(self.model.parameters()))
        shape = (setting.steps, setting.workers, setting.batch)
        # All places at once, since each transfer to a device would wait for it.
        self.starts = starts(self.text, shape, setting.length, seed)
        self.backward = self.graphed() if self.text.is_cuda and not eager else self.backward_of

    def loss(self, text: Tensor, places: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=text.is_cuda, cache_enabled=False):
            loss: Tensor = self.model(*pieces(text, places, self.setting.length))
        return loss

    def backward_of(self, places: Tensor) -> None:
        self.loss(self.text, places).backward()

    def graphed(self) -> Callable[[Tensor], None]:
        """The same as a CUDA graph: some 600 small kernels, which take longer to launch than to run."""
        parameters = list(self.model.parameters())
        gradients = [torch.zeros_like(p) for p in parameters]
        places = self.starts[0, 0].clone()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.backward_of(places)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch._foreach_zero_(gradients)
            self.backward_of(places)

        def replay(new_places: Tensor) -> None:
            places.copy_(new_places)
            graph.replay()
            torch._foreach_copy_([p.grad for p in parameters if p.grad is not None], gradients)

        return replay

    def step(self, step: int) -> None:
        for rank in range(self.setting.workers):
            with self.ranks.backward_of(rank):
                self.backward(self.starts[step, rank])
        self.ranks.average()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.setting.steps, self.setting.lr)
        self.optimizer.step()

    def now(self) -> float:
        """The time when all that was begun is done."""
        if self.text.is_cuda:
            torch.cuda.synchronize()
        return time.monotonic()

    def evaluate(self, num_pieces: int) -> float:
        places = starts(self.held_out, (num_pieces,), self.setting.length, 0)
        with torch.no_grad():
            losses = [self.loss(self.held_out, part) for part in places.split(64)]
        return float(torch.stack(losses).mean())


def train(
    setting: Setting,
    recipe: str,
    seed: int,
    texts: tuple[Tensor, Tensor],
    num_held_out: int,
    deadline: float,
    tell: Callable[[int, float], None],
    eager: bool,
) -> Run:
    """Train once; raise OutOfTime as soon as it is clear that the end comes after the deadline."""
    begin = timed_from = time.monotonic()
    trainer = Trainer(setting, recipe, seed, texts, eager)
    every = max(1, setting.steps // NUM_EVALUATIONS)
    curve = {0: trainer.evaluate(num_held_out)}
    for done in range(1, setting.steps + 1):
        trainer.step(done - 1)
        if done == NUM_WARM_UP_STEPS:
            timed_from = trainer.now()
        if done == NUM_WARM_UP_STEPS + NUM_TIMED_STEPS:
            needed = (trainer.now() - timed_from) / NUM_TIMED_STEPS * (setting.steps - done)
            if time.monotonic() + needed > deadline:
                raise OutOfTime(f"{recipe}, seed {seed} would take {needed:.0f} s more")
        if done % every == 0 or done == setting.steps:
            curve[done] = trainer.evaluate(num_held_out)
        tell(done, list(curve.values())[-1])
    sent = max(traffic.bytes_sent for traffic in trainer.ranks.traffic)
    return Run(
        recipe=recipe,
        seed=seed,
        setting=setting,
        num_parameters=sum(p.numel() for p in trainer.model.parameters()),
        bytes_per_step=sent / setting.steps,
        seconds=time.monotonic() - begin,
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
    recipes = chosen_recipes(options.recipes)
    wanted = [(recipe, seed) for seed in options.seeds for recipe in recipes]
    missing = [pair for pair in wanted if pair not in {(run.recipe, run.seed) for run in runs}]
    texts = tuple(text.to(device) for text in corpus())
    columns = (*Progress.get_default_columns(), TextColumn("held-out loss {task.fields[loss]:.4f}"))
    with Progress(*columns) as progress:
        for recipe, seed in missing:
            bar = progress.add_task(f"{recipe}, seed {seed}", total=setting.steps, loss=float("nan"))

            def tell(done: int, loss: float, bar: TaskID = bar) -> None:
                progress.update(bar, completed=done, loss=loss)

            num_held_out = NUM_HELD_OUT[options.setting]
            if replicas.period_of(recipe):
                if device.type != "cpu":
                    progress.print(f"{recipe} is trained by processes on CPU, not on {device}: skipped")
                    continue
                append(path, train_replicas(setting, recipe, seed, num_held_out, tell))
                continue
            try:
                run = train(
                    setting, recipe, seed, (texts[0], texts[1]), num_held_out, deadline, tell, options.eager
                )
            except OutOfTime as reason:
                progress.print(f"{reason}, and {deadline - time.monotonic():.0f} s are left: run this again")
                return 3
            append(path, run)
            progress.print(f"{recipe}, seed {seed}: {run.loss:.4f} after {run.seconds:.0f} s")
    print(f"all {len(wanted)} rows are in {path}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
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
            options.plot[1].write_text(draw(read(options.plot[0]), options.link))
    except ValueError as reason:
        parser.error(str(reason))
    if options.table or options.plot:
        return 0
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Setting)}
    changes = {name: value for name, value in given.items() if value is not None}
    setting = SETTINGS[options.setting]
    if options.optimizer not in (None, setting.optimizer) and options.lr is None:
        if (options.setting, options.optimizer) not in LEARNING_RATES:
            parser.error(f"give --lr: none is known for {options.optimizer} in the {options.setting} setting")
        changes["lr"] = LEARNING_RATES[options.setting, options.optimizer]
    return run_all(options, dataclasses.replace(setting, **changes))


if __name__ == "__main__":
    sys.exit(main())
