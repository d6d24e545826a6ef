"""How functions become kernels: compiled by numba, kept in its cache on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def kernel(signature: Any, reorders_sums: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile at once, without the GIL, from numba's cache on disk if a folder for it can be written.

    ``reorders_sums`` lets a sum be taken in as many parts as a vector has, the same ones each time.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        if reorders_sums:
            options["fastmath"] = {"reassoc", "contract", "nsz"}
        try:
            dispatcher = numba.njit(cache=True, **options)(function)
            _expire_with_helpers(dispatcher)
        except RuntimeError:  # no folder to cache in can be written
            dispatcher = numba.njit(**options)(function)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher  # type: ignore[no-any-return]

    return compiled


def _expire_with_helpers(dispatcher: Any) -> None:
    """Give up what is cached when any file of `ops` changes: numba looks at the kernel's own alone."""
    cached: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(cached, "_source_stamp"):
        cached._source_stamp = _sources()


@functools.cache
def _sources() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of kernels, compiled as part of each: it cannot be called from Python."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
    return numba.njit(nogil=True, error_model="numpy", **options)(function)  # type: ignore[no-any-return]
