"""What is to become a row of `convergence.py`, and who trains it."""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runs import Setting


class Taken(Exception):
    """Another process trains this row."""


@dataclass(frozen=True)
class Row:
    """What is to become a row: a recipe with a seed, and where its run is saved until it is done."""

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
        """Keep other processes from training this row; raise Taken if one does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.saved.with_suffix(".lock")
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which ends with this process, however
            except BlockingIOError:
                raise Taken(f"{self} is trained by another process") from None
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
