"""Runs of `convergence.py`, as rows of a CSV file."""

import csv
import dataclasses
import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """What is trained, and how long."""

    workers: int
    steps: int
    width: int
    layers: int
    length: int
    batch: int
    """Pieces of text of this length that each worker takes in a step."""
    lr: float
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name} must be at least 1, not {value}")

    def __str__(self) -> str:
        size = f"{self.layers} layers of width {self.width}"
        by = "" if self.optimizer == "adamw" else f"{self.optimizer.upper()} with lr {self.lr:g}, "
        return f"{self.workers} workers x {self.batch} x {self.length} bytes, {self.steps} steps, {by}{size}"


@dataclass(frozen=True)
class Run:
    """One recipe with one seed."""

    recipe: str
    seed: int
    setting: Setting
    num_parameters: int
    bytes_per_step: float
    """What the busiest worker sends."""
    seconds: float
    curve: dict[int, float]
    """Held-out loss, in nats a byte, by the number of steps."""
    machine: str
    versions: str

    @property
    def loss(self) -> float:
        return self.curve[max(self.curve)]

    @property
    def lowest(self) -> float:
        """The least loss on the way: below that at the end if the model came to know its text by heart."""
        return min(self.curve.values())


def append(path: Path, run: Run) -> None:
    """Add a row, and the header if it is the first."""
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
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: others may add theirs
        file.seek(0)
        text = file.read()
        columns = next(csv.reader(text.splitlines()), None)
        if text and not text.endswith("\n"):
            file.write("\n")  # as some editors leave it
        writer = csv.DictWriter(file, columns or list(row))
        if columns is None:
            writer.writeheader()
        elif "optimizer" not in columns and run.setting.optimizer == "adamw":
            del row["optimizer"]  # the file is older than the column
        writer.writerow(row)


def read(path: Path) -> list[Run]:
    """All rows; ValueError if there is no such file, or if a row is none of ours or not whole."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        try:
            return [_run(row) for row in reader]
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}, line {reader.line_num}, is no row of a run: {error!r}") from error


def _run(row: dict[str, str]) -> Run:
    if None in row.values() or None in row:  # as csv tells of a line that is short, or long
        raise ValueError("it has not as many values as there are columns")
    kinds = {field.name: field.type for field in dataclasses.fields(Setting)}
    points = [point.split("=") for point in row["curve"].split()]
    return Run(
        recipe=row["recipe"],
        seed=int(row["seed"]),
        # Without a column for it, the optimizer was the default.
        setting=Setting(**{name: kind(row[name]) for name, kind in kinds.items() if name in row}),  # type: ignore[operator]
        num_parameters=int(row["num_parameters"]),
        bytes_per_step=float(row["bytes_per_step"]),
        seconds=float(row["seconds"]),
        curve={int(step): float(loss) for step, loss in points},
        machine=row["machine"],
        versions=row["versions"],
    )


def setting_of(runs: Sequence[Run]) -> Setting:
    """The one setting of all runs, since losses of two do not compare."""
    if not runs:
        raise ValueError("there are no runs")
    settings = list(dict.fromkeys(run.setting for run in runs))
    if len(settings) != 1:
        raise ValueError(f"runs of one setting are wanted, not of {len(settings)}: {settings}")
    return settings[0]


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of each recipe, in the order in which recipes first appear."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.recipe, []).append(run)
    return found
