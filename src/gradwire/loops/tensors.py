"""The tensors of one call: their names, and checks that they can be averaged in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

Tensors = Tensor | Iterable[Tensor] | Mapping[str, Tensor]
"""One tensor, several without names, or several by name."""

_AS_THEY_ARE = {
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.complex64,
}
# There is no arithmetic in these dtypes, so they are averaged in fp32 and rounded at the end.
_WIDENED = {
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
}


def bucket_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are averaged."""
    return _WIDENED.get(dtype, dtype)


def named_tensors(tensors: Tensors, device_types: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of a call by name; tensors without names are numbered.

    Raises TypeError for anything that cannot be averaged in place, and ValueError if there is nothing.
    """
    if isinstance(tensors, Tensor):
        found = {"0": tensors}
    elif isinstance(tensors, Mapping):
        found = dict(tensors)
        for name in found:
            if not isinstance(name, str):
                raise TypeError(f"the names of tensors are text, not {name!r}")
    elif isinstance(tensors, set | frozenset):
        raise TypeError("a set has another order on every rank: give a list, or a dict by name")
    elif isinstance(tensors, Iterable):
        found = {str(number): tensor for number, tensor in enumerate(tensors)}
    else:
        raise TypeError(f"give a tensor, a list of tensors or a dict by name, not {type(tensors).__name__}")
    if not found:
        raise ValueError("there is no tensor to average; leave out the call on every rank")
    for name, tensor in found.items():
        _check(name, tensor, device_types)
    return found


def _check(name: str, tensor: Tensor, device_types: Collection[str]) -> None:
    if tensor is None:
        raise TypeError(
            f"tensor {name!r} is None. If it is a gradient that this rank has not, give zeros; if no rank "
            "has it, leave it out on every rank"
        )
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor {name!r} is a {type(tensor).__name__}, not a tensor")
    if hasattr(tensor, "to_local"):
        raise TypeError(f"tensor {name!r} is a {type(tensor).__name__}: average its .to_local()")
    if tensor.layout != torch.strided:
        raise TypeError(f"tensor {name!r} is sparse, which cannot be averaged in place: make it dense")
    if tensor.dtype not in _AS_THEY_ARE and tensor.dtype not in _WIDENED:
        raise TypeError(
            f"tensor {name!r} has dtype {tensor.dtype}, and only floating and complex tensors have means: "
            "convert it first"
        )
    if (kind := tensor.device.type) not in device_types:
        other = f", or make an Averager with device={kind!r}" if kind in ("cpu", "cuda") else ""
        raise TypeError(
            f"tensor {name!r} is on {tensor.device}, and this averager takes tensors on "
            f"{' and '.join(device_types)}: move it{other}"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise TypeError(f"values of tensor {name!r} share memory: average its .contiguous()")
