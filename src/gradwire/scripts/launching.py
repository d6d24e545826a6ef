"""Run a script or a module in this process, as ``python`` would."""

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
    """A file, or a module with ``is_module``, and its own arguments.

    Raises ValueError if there is no such file or module.
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
            except ImportError:  # its package is missing
                found = None
            if found is None:
                raise ValueError(f"there is no module {self.name}")

    @classmethod
    def of(cls, words: Sequence[str], is_module: bool) -> Script:
        """Make a script from the words of a command line.

        A leading ``python`` is dropped, and a ``-m`` after it names a module.
        """
        if not is_module and len(words) > 1 and Path(words[0]).name.startswith("python"):
            words = words[1:]
        if not is_module and words[:1] == ["-m"]:
            words, is_module = words[1:], True
        if not words:
            raise ValueError("which script? Give it after the options: -- train.py --its-own options")
        return cls(words[0], tuple(words[1:]), is_module)

    @property
    def words(self) -> list[str]:
        """The words from which `of` makes this script again in another process."""
        return [self.name, *self.arguments]

    def __str__(self) -> str:
        return self.name if not self.is_module else f"-m {self.name}"


def run_script(script: Script) -> None:
    """Run the script as ``__main__``, and let everything that it raises pass, ``SystemExit`` too."""
    sys.argv = [script.name, *script.arguments]
    if script.is_module:
        runpy.run_module(script.name, run_name="__main__", alter_sys=True)
    else:
        _put_first(str(Path(script.name).resolve().parent))
        runpy.run_path(script.name, run_name="__main__")


def show_error(error: Exception) -> None:
    """Print an uncaught error as python does, without our own frames above the script's."""
    own = _below_runpy(error.__traceback__)
    # torch replaces the hook by one that names the rank, and that reads the error's own traceback.
    sys.excepthook(type(error), error.with_traceback(own), own)


def _below_runpy(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that belongs to the script."""
    found, here = trace, trace
    while here is not None:
        if "runpy" in here.tb_frame.f_code.co_filename:
            found = here.tb_next
        here = here.tb_next
    return found or trace


def _put_first(folder: str) -> None:
    """Make ``folder`` the first to import from, as python does for a script that it runs."""
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
