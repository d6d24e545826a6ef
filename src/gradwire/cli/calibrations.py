"""The calibration of ``gradwire plan``: read from its file, or measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gradwire.cli.progress import show_progress
from gradwire.planner import Calibration, calibrate


def load_calibration(path: Path | None, recipes: Sequence[str], console: Console) -> Calibration:
    """Read the calibration at ``path``, or measure one and write it there.

    Warns on ``console`` if the machine was busy. Raises ValueError if the file is no calibration, or one
    without some of the recipes.
    """
    if path is not None and path.exists():
        found = _read(path)
        if missing := [recipe for recipe in recipes if recipe not in found.costs]:
            raise ValueError(
                f"--calibration: {path} has no speeds of {', '.join(missing)}, only of "
                f"{', '.join(found.costs)}. Remove it, or name a new file: then all recipes that you plan "
                "are measured"
            )
    else:
        with show_progress(console, "measuring the speed of the recipes") as on_progress:
            found = calibrate(recipes, on_progress)
        if path is not None:
            path.write_text(found.to_json())
    if found.was_disturbed:
        console.print(
            f"warning: the speeds were measured on a busy machine, with a load average of "
            f"{found.load_average:.1f} on {found.num_cores} cores. Predictions will be too slow: measure "
            "again when it is idle",
            markup=False,
        )
    return found


def _read(path: Path) -> Calibration:
    try:
        return Calibration.from_json(path.read_text(errors="replace"))
    except OSError as error:
        raise ValueError(f"--calibration: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(
            f"--calibration: {path} is {error}. Give a file that `gradwire plan` wrote, or the name of a new "
            "one: it is measured and written"
        ) from None
