"""Names of dtypes, as states and groupings hold them."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


# The dtypes that gradients and states can have. Text from a checkpoint is looked up here and nowhere else.
_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.complex32,
    )
}


def dtype_named(name: object) -> torch.dtype:
    """Return the dtype of this name; ValueError for anything but the name of a floating or complex dtype.

    >>> dtype_named("bfloat16")
    torch.bfloat16
    """
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"{name!r:.80} is no dtype of gradients; known are {', '.join(_DTYPES)}")
    return found
