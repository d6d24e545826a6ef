"""Decorators that compile functions with numba and cache the result on disk."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

log = logging.getLogger("gradwire")


def kernel(signature: Any, reorders_sums: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function now, to run without the GIL, or load it from numba's cache on disk.

    Nothing is cached where no cache folder can be written, or where one holds damaged files; both are logged.
    ``reorders_sums`` lets LLVM split a sum into as many parts as a vector register has; the split is the same
    in every call, but not on every processor. So it is for sums that a rank sends, not for those that all
    ranks compute.

    Pass a kernel plain tuples, and name their fields inside it: numba takes 0.4 us to unpack a NamedTuple
    that comes from Python, and none for one that a kernel makes.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        if reorders_sums:
            options["fastmath"] = {"reassoc", "contract", "nsz"}
        dispatcher = None
        try:
            dispatcher = numba.njit(cache=True, **options)(function)
            _expire_with_helpers(dispatcher)
            dispatcher.compile(signature)
        except Exception as error:  # a damaged file raises almost anything
            folder = "" if dispatcher is None else str(dispatcher._cache.cache_path)
            dispatcher = numba.njit(**options)(function)
            dispatcher.compile(signature)  # raises if the kernel itself is wrong
            _tell_cache_unusable(folder, f"{type(error).__name__}: {error}")
        dispatcher.disable_compile()
        return dispatcher  # type: ignore[no-any-return]

    return compiled


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function into each place of a kernel that calls it; it cannot be called from Python."""
    return _part(function, forceinline=True)


def subroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once for each kernel: for large functions that are called in several places."""
    return _part(function, forceinline=False)


def _part(function: Callable[..., Any], forceinline: bool) -> Callable[..., Any]:
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": forceinline}
    return numba.njit(nogil=True, error_model="numpy", **options)(function)  # type: ignore[no-any-return]


@functools.cache
def _tell_cache_unusable(folder: str, why: str) -> None:
    """Log, once, that kernels are compiled in every process."""
    log.warning(
        "numba's cache of compiled kernels%s cannot be used (%.300s), so gradwire compiles its kernels in "
        "every process, which takes seconds; %sset NUMBA_CACHE_DIR to a folder that can be written",
        f" in {folder}" if folder else "",
        why,
        "delete that folder, or " if folder else "",
    )


def _expire_with_helpers(dispatcher: Any) -> None:
    """Invalidate cached code when any file of `ops` changes: numba checks only the kernel's own file."""
    cached: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(cached, "_source_stamp"):
        cached._source_stamp = _sources()


@functools.cache
def _sources() -> str:
    """Return a hash of all files of `ops`."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
