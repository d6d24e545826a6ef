"""Act when a module is imported; needs nothing but the standard library."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportNotice(MetaPathFinder):
    """Calls ``then`` with a module once it has been imported; install it with `watch`."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._then = then
        self._is_searching = False

    def watch(self) -> None:
        """Wait for the import, or act at once if it is over."""
        if self.name in sys.modules:
            self._then(sys.modules[self.name])
        else:
            sys.meta_path.insert(0, self)

    def ignore(self) -> None:
        """Watch no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader also acts; None for other modules.

        Whoever only asks whether the module exists gets a spec too, and loads nothing.
        """
        if fullname != self.name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            self.ignore()
            execute(module)
            self._then(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
