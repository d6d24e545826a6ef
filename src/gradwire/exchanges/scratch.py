"""Memory that exchanges reuse from bucket to bucket."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow to the largest request, so that a steady state allocates nothing.

    A buffer holds until the next request of the same name and device.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}
        self._parts: dict[int, Scratch] = {}

    def part(self, number: int) -> Scratch:
        """Buffers of their own, for one of several buckets that are exchanged side by side."""
        return self._parts.setdefault(number, Scratch())

    def bytes(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """A buffer of ``num_bytes`` bytes, its content undefined."""
        buffer = self._buffers.get((name, device))
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._buffers[name, device] = buffer
        return buffer[:num_bytes]

    def like(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer of the size of ``tensor``, in ``dtype``, its content undefined."""
        return self.bytes(name, tensor.numel() * dtype.itemsize, tensor.device).view(dtype)
