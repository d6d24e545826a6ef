"""Runs of `convergence.py`, as rows of a CSV file."""

import csv
import dataclasses
import fcntl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BASE = "fp32"
"""The recipe that others are compared with."""


@dataclass(frozen=True)
class Setting:
    """A model, its data and the length of its training."""

    workers: int
    steps: int
    width: int
    layers: int
    length: int
    batch: int
    """Pieces of text, each of `length` bytes, or images of `length` by `length`, per worker and step."""
    lr: float
    optimizer: str = "adamw"
    data: str = "text"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name} must be at least 1, not {value}")

    def __str__(self) -> str:
        taken, size = f"{self.batch} x {self.length} bytes", f"{self.layers} layers of width {self.width}"
        if self.data == "images":
            taken = f"{self.batch} images of {self.length} x {self.length}"
            size = f"3 x {self.layers} residual blocks of width {self.width} to {4 * self.width}"
        by = "" if self.optimizer == "adamw" else f"{self.optimizer.upper()} with lr {self.lr:g}, "
        return f"{self.workers} workers x {taken}, {self.steps} steps, {by}{size}"

    @property
    def unit(self) -> str:
        """The unit of losses."""
        return "nats an image" if self.data == "images" else "nats a byte"


@dataclass(frozen=True)
class Run:
    """The result of training with one recipe and one seed."""

    recipe: str
    seed: int
    setting: Setting
    num_parameters: int
    bytes_per_step: float
    """Bytes that the busiest worker sends."""
    seconds: float
    curve: dict[int, float]
    """Held-out loss, by number of steps."""
    machine: str
    versions: str

    @property
    def loss(self) -> float:
        return self.curve[max(self.curve)]

    @property
    def lowest(self) -> float:
        """The lowest loss on the way; below the last one if the model has overfitted."""
        return min(self.curve.values())


def append(path: Path, run: Run) -> None:
    """Append a row, and the header before the first one."""
    row = {
        "recipe": run.recipe,
        "seed": run.seed,
        **dataclasses.asdict(run.setting),
        "num_parameters": run.num_parameters,
        "bytes_per_step": run.bytes_per_step,
        "held_out_loss": f"{run.loss:.6f}",
        "seconds": f"{run.seconds:.1f}",
        "curve": " ".join(f"{step}={loss:.6f}" for step, loss in run.curve.items()),
        "machine": run.machine,
        "versions": run.versions,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: other processes append too
        file.seek(0)
        text = file.read()
        columns = next(csv.reader(text.splitlines()), None)
        if text and not text.endswith("\n"):
            file.write("\n")  # some editors leave out the last newline
        writer = csv.DictWriter(file, columns or list(row), lineterminator="\n")
        if columns is None:
            writer.writeheader()
        # A file may be older than a column; its rows then have the default, as this one must.
        defaults = {field.name: field.default for field in dataclasses.fields(Setting)}
        writer.writerow({k: v for k, v in row.items() if k in writer.fieldnames or v != defaults.get(k)})


def read(path: Path) -> list[Run]:
    """Return all rows; raise ValueError if the file is missing, or if a row is invalid or incomplete."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; train first, or give another path")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        try:
            return [_run(row) for row in reader]
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}, line {reader.line_num}, is no row of a run: {error!r}") from error


def _run(row: dict[str, str]) -> Run:
    if None in row.values() or None in row:  # csv reports short and long lines this way
        raise ValueError("it does not have one value per column")
    kinds = {field.name: field.type for field in dataclasses.fields(Setting)}
    points = [point.split("=") for point in row["curve"].split()]
    return Run(
        recipe=row["recipe"],
        seed=int(row["seed"]),
        # Files without a column used the default.
        setting=Setting(**{name: kind(row[name]) for name, kind in kinds.items() if name in row}),  # type: ignore[operator]
        num_parameters=int(row["num_parameters"]),
        bytes_per_step=float(row["bytes_per_step"]),
        seconds=float(row["seconds"]),
        curve={int(step): float(loss) for step, loss in points},
        machine=row["machine"],
        versions=row["versions"],
    )


def setting_of(runs: Sequence[Run]) -> Setting:
    """Return the setting of all runs; raise ValueError if they differ, since their losses do not compare."""
    if not runs:
        raise ValueError("there are no runs in this file")
    settings = list(dict.fromkeys(run.setting for run in runs))
    if len(settings) != 1:
        raise ValueError(f"all runs must have one setting, but these have {len(settings)}: {settings}")
    return settings[0]


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by recipe, in the order in which recipes first appear."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.recipe, []).append(run)
    return found


def has_overfitted(base: Iterable[Run]) -> bool:
    """Return True if a loss of fp32 has risen before the end, so that the lowest losses compare better."""
    return any(run.lowest < run.loss for run in base)


def gaps_to(base: Mapping[int, Run], runs: Iterable[Run], *, lowest: bool = False) -> list[float]:
    """Return the gaps to fp32 with the same seed, by final or by lowest loss, in percent."""

    def loss_of(run: Run) -> float:
        return run.lowest if lowest else run.loss

    return [100 * (loss_of(run) / loss_of(base[run.seed]) - 1) for run in runs if run.seed in base]
