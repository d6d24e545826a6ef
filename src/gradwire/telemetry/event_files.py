"""The files that events are written to: one for each model on each rank that writes."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from pathlib import Path
from typing import TextIO
from weakref import WeakValueDictionary

log = logging.getLogger("gradwire")

_lock = threading.Lock()
# The files that models of this process write now, by their real paths.
_open_files: WeakValueDictionary[str, TextIO] = WeakValueDictionary()


def check_events(name: str, rank: int, *, is_first: bool) -> None:
    """Raise OSError if this rank's events cannot be written; leave no new file behind."""
    wanted = _wanted_path(name, rank, is_first)
    if wanted is None:
        return
    with _lock:
        path = _free_path(wanted)
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()


def open_events(name: str, rank: int, *, is_first: bool) -> TextIO | None:
    """Open the file for a model's events on this rank; return None if this rank writes none.

    ``rank`` is this process's rank in the world, and ``is_first`` is True on the first of the model's ranks.
    That one writes, or every rank if ``{rank}`` is in the name. No two files that are open at once are the
    same: names tell ranks of the world apart, and models that one rank has.
    """
    wanted = _wanted_path(name, rank, is_first)
    if wanted is None:
        return None
    with _lock:
        path = _free_path(wanted)
        # Buffered by line, so that events before a crash are in the file.
        file = path.open("a", buffering=1, encoding="utf-8")
        _open_files[os.path.realpath(path)] = file
    if path.name != Path(name.replace("{rank}", str(rank))).name:
        log.info("rank %d: events of this model are written to %s", rank, path)
    return file


def _wanted_path(name: str, rank: int, is_first: bool) -> Path | None:
    """Return the file for the first model of this rank; None if this rank writes none."""
    if "{rank}" in name:
        return Path(name.replace("{rank}", str(rank))).absolute()
    if not is_first:
        return None
    path = Path(name).absolute()
    # Models on other ranks may be given the same name, and each has a first rank.
    return path if rank == 0 or _is_special(path) else path.with_stem(f"{path.stem}-rank{rank}")


def _free_path(wanted: Path) -> Path:
    """Return the file for the next model of this rank: the wanted one, unless another model writes it."""
    if _is_special(wanted):
        return wanted
    others = (wanted.with_stem(f"{wanted.stem}-model{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([wanted], others) if not _is_taken(path))


def _is_taken(path: Path) -> bool:
    file = _open_files.get(os.path.realpath(path))
    return file is not None and not file.closed


def _is_special(path: Path) -> bool:
    """Return True for a device, a pipe or a folder, beside which no other file can take its place."""
    return path.exists() and not path.is_file()
