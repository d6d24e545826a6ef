"""Runs a script or a module in this process, as ``python`` itself would."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Script:
    """What to run: a file, or with ``is_module`` a module's name, and its own arguments.

    Raises ValueError for a file or a module that is not there.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        if not self.is_module and not Path(self.name).is_file():
            raise ValueError(f"there is no script {self.name}")
        if self.is_module:
            _put_first(os.getcwd())
            try:
                found = importlib.util.find_spec(self.name)
            except ImportError:  # of its package
                found = None
            if found is None:
                raise ValueError(f"there is no module {self.name}")

    @classmethod
    def of(cls, words: Sequence[str], is_module: bool) -> Script:
        """From words of a command line; ``python -m train`` and ``python train.py`` mean what they say."""
        if not is_module and len(words) > 1 and Path(words[0]).name.startswith("python"):
            words = words[1:]
        if not is_module and words[:1] == ["-m"]:
            words, is_module = words[1:], True
        if not words:
            raise ValueError("which script? Give it after the options: -- train.py --its-own options")
        return cls(words[0], tuple(words[1:]), is_module)

    @property
    def words(self) -> list[str]:
        """What `of` takes to make this again in another process."""
        return [self.name, *self.arguments]

    def __str__(self) -> str:
        return self.name if not self.is_module else f"-m {self.name}"


def run_script(script: Script) -> None:
    """Run the script as ``__main__``; whatever it raises, ``SystemExit`` included, leaves this."""
    sys.argv = [script.name, *script.arguments]
    if script.is_module:
        runpy.run_module(script.name, run_name="__main__", alter_sys=True)
    else:
        _put_first(str(Path(script.name).resolve().parent))
        runpy.run_path(script.name, run_name="__main__")


def show_error(error: Exception) -> None:
    """What python prints for an error that nobody caught, without the frames above the script, ours."""
    own = _below_runpy(error.__traceback__)
    # torch's own, which says on which rank, reads the error's traceback.
    sys.excepthook(type(error), error.with_traceback(own), own)


def _below_runpy(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is the script's own."""
    found, here = trace, trace
    while here is not None:
        if "runpy" in here.tb_frame.f_code.co_filename:
            found = here.tb_next
        here = here.tb_next
    return found or trace


def _put_first(folder: str) -> None:
    """Import from there before anywhere else, as python does for what it runs."""
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
