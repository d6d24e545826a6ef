"""Rows that `convergence.py` has to train, and the lock that gives each to one process."""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runs import Setting


class Taken(Exception):
    """Raised when another process trains this row."""


@dataclass(frozen=True)
class Row:
    """A row to train: a recipe with a seed, and the folder that keeps its unfinished run."""

    setting: Setting
    recipe: str
    seed: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.recipe}, seed {self.seed}"

    @property
    def saved(self) -> Path:
        of = hashlib.sha256(repr((self.setting, self.recipe, self.seed)).encode()).hexdigest()
        return self.folder / f"unfinished-{of[:16]}.pt"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other processes from training this row; raise Taken if one trains it already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.saved.with_suffix(".lock")
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock ends with this process
            except BlockingIOError:
                raise Taken(f"{self} is trained by another process") from None
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
