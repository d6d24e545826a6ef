"""Files with the states of one model's wire, one per rank and step.

A script resumes as it likes: from any file, with any library, before or after it makes its model. All of them
end with the saved weights in the model. So a file is named by a hash of the weights at its time, and the
state to load is the one whose weights are, bit for bit, those of the model when it is first trained.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.serialization import save

from gradwire.averaging import merge_state_dicts, read_saved

log = logging.getLogger("gradwire")

_NAME = re.compile(r"model(\d+)-step(\d+)-([0-9a-f]{16})-rank(\d+)of(\d+)\.pt")
# The number of states that a rank keeps of each model.
_NUM_KEPT = 4


@dataclass(frozen=True)
class StateFile:
    """One rank's state of one model, as its name tells."""

    path: Path
    model: int
    step: int
    weights: str
    """The hash of the model's weights."""
    rank: int
    world_size: int

    @classmethod
    def parse(cls, path: Path) -> StateFile | None:
        """Return the file with this path; None if it is no state."""
        found = _NAME.fullmatch(path.name)
        if found is None:
            return None
        model, step, weights, rank, world_size = found.groups()
        return cls(path, int(model), int(step), weights, int(rank), int(world_size))


@dataclass(frozen=True)
class StateFiles:
    """The states of one model in a folder, as one rank writes and reads them."""

    folder: Path
    model: int
    """The number of the model in its script."""
    rank: int
    world_size: int

    def saved_steps(self) -> list[int]:
        """Return the steps of which any rank of any run has saved a state, in order."""
        return sorted({each.step for each in self._all()})

    def write(self, state: Mapping[str, Any], step: int, weights: str) -> None:
        """Write this rank's state, and remove its oldest ones; log a warning if that is impossible."""
        name = f"model{self.model}-step{step}-{weights}-rank{self.rank}of{self.world_size}.pt"
        try:
            _write_atomically(state, self.folder / name)
            own = [each for each in self._all() if each.rank == self.rank]
            for old in sorted(own, key=lambda each: each.path.stat().st_mtime)[:-_NUM_KEPT]:
                old.path.unlink(missing_ok=True)
        except OSError as error:
            # A full disk must not end a run.
            log.warning(
                "rank %d: the state of step %d cannot be written to %s: %s. Training goes on; a run that is "
                "resumed from this step starts with an empty state",
                self.rank,
                step,
                self.folder,
                error,
            )

    def read(self, weights: str) -> dict[int, Mapping[str, Any]]:
        """Return the states for these weights that this rank can load, by step.

        They are its own, or those of all ranks of a run with another number of ranks.
        """
        found: dict[int, Mapping[str, Any]] = {}
        files = [each for each in self._all() if each.weights == weights]
        runs = {(each.step, each.world_size) for each in files}
        # Those of as many ranks come last, and so replace others of the same step.
        for step, size in sorted(runs, key=lambda run: run[1] == self.world_size):
            of_run = {each.rank: each.path for each in files if (each.step, each.world_size) == (step, size)}
            wanted = [self.rank] if size == self.world_size else list(range(size))
            if not all(each in of_run for each in wanted):
                continue
            try:
                states = [read_saved(of_run[each], of_run[each]) for each in wanted]
                found[step] = states[0] if size == self.world_size else merge_state_dicts(states)
            except Exception as error:
                log.warning("rank %d: a state of step %d is left out: %s", self.rank, step, error)
        return found

    def _all(self) -> list[StateFile]:
        found = filter(None, map(StateFile.parse, self.folder.iterdir()))
        return [each for each in found if each.model == self.model]


def _write_atomically(state: Mapping[str, Any], path: Path) -> None:
    """Write a state so that the file is complete or absent, also after a power cut; may raise OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's own error does not say that the disk is full
            raise error.__context__ from None
        raise
    finally:
        partial.unlink(missing_ok=True)
