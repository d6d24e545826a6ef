"""Files with the states of all ranks, in a folder beside or inside a framework's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from fsspec.core import url_to_fs

from gradwire.averaging import read_saved

_FORMAT = "gradwire adapter state 1"
_FIELDS = {"format": str, "kind": str, "step": int | None, "rank": int, "world_size": int, "state": dict}


def _is_state(content: object) -> bool:
    """Return True if this is what `StateFolder.write` writes."""
    return (
        isinstance(content, dict)
        and content.keys() == _FIELDS.keys()
        and all(isinstance(content[name], kind) for name, kind in _FIELDS.items())
        and content["format"] == _FORMAT
    )


@dataclass(frozen=True)
class StateFolder:
    """A folder with one file for each rank; ``path`` may be any that fsspec knows.

    ``kind`` names what makes the states, and ``step`` is the framework's step at the checkpoint, if it counts
    steps. A state of another kind or step is refused.
    """

    path: str
    kind: str
    step: int | None = None

    def write(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Write this rank's state; a reader sees the whole file or none."""
        files, folder = url_to_fs(self.path)
        files.makedirs(folder, exist_ok=True)
        content = {
            "format": _FORMAT,
            "kind": self.kind,
            "step": self.step,
            "rank": rank,
            "world_size": world_size,
            "state": dict(state),
        }
        name = f"{folder}/rank{rank}.pt"
        with files.open(f"{name}.part", "wb") as file:
            torch.save(content, file)
        files.mv(f"{name}.part", name)
        if rank == 0:
            self._remove_others(world_size)

    def read(self, rank: int, world_size: int) -> list[dict[str, Any]] | None:
        """Return this rank's state, or those of all ranks that saved if their number was another one.

        Returns None if the folder does not exist. Raises ValueError if a file is missing, is not one of ours,
        or belongs to another rank, kind or step.
        """
        files, folder = url_to_fs(self.path)
        if not files.isdir(folder):
            return None
        own = files.exists(f"{folder}/rank{rank}.pt")
        first = self._read_one(rank if own else 0, of_ranks=None)
        num_saved = first["world_size"]
        if num_saved == world_size:
            return [(first if own else self._read_one(rank, num_saved))["state"]]
        return [self._read_one(saved, num_saved)["state"] for saved in range(num_saved)]

    def remove(self) -> None:
        """Remove the folder, if it exists."""
        files, folder = url_to_fs(self.path)
        if files.isdir(folder):
            files.rm(folder, recursive=True)

    def _remove_others(self, world_size: int) -> None:
        """Remove the files of ranks that an earlier save had and this one has not."""
        files, folder = url_to_fs(self.path)
        for name in files.ls(folder, detail=False):
            number = PurePath(name).stem.removeprefix("rank")
            if number.isdecimal() and int(number) >= world_size:
                files.rm(name)

    def _read_one(self, rank: int, of_ranks: int | None) -> dict[str, Any]:
        files, folder = url_to_fs(self.path)
        name = f"{folder}/rank{rank}.pt"
        if not files.exists(name):
            others = f" of {of_ranks}" if of_ranks is not None else ""
            raise ValueError(f"{name}, the state of rank {rank}{others}, is missing: {self._remedy}")
        try:
            with files.open(name, "rb") as file:
                content: dict[str, Any] = read_saved(file, name)
        except ValueError as error:
            raise ValueError(f"{error}: {self._remedy}") from None
        if not _is_state(content):
            raise ValueError(f"{name} is not a state that this version of gradwire saves: {self._remedy}")
        if content["rank"] != rank or of_ranks not in (None, content["world_size"]):
            raise ValueError(
                f"{name} is the state of rank {content['rank']} of {content['world_size']}, not that of rank "
                f"{rank}: {self._remedy}"
            )
        if content["kind"] != self.kind:
            raise ValueError(f"{name} was saved by {content['kind']}, not by {self.kind}: {self._remedy}")
        if content["step"] != self.step and self.step is not None:
            raise ValueError(
                f"{name} is of step {content['step']} and the checkpoint of step {self.step}: {self._remedy}"
            )
        return content

    @property
    def _remedy(self) -> str:
        return f"restore it, or remove the folder {self.path} to resume without what the ranks had held back"
