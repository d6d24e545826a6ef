"""Scratch memory that exchanges reuse from bucket to bucket."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow to the largest request, so that a steady state allocates nothing.

    A buffer is valid until the next request with the same name and device.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}
        self._parts: dict[int, Scratch] = {}

    def part(self, number: int) -> Scratch:
        """Return separate buffers for one of several buckets that are exchanged side by side."""
        return self._parts.setdefault(number, Scratch())

    def clear(self) -> None:
        """Free all buffers."""
        self._buffers.clear()
        self._parts.clear()

    def buffers(self) -> list[Tensor]:
        """Return all buffers, those of parts too."""
        own = list(self._buffers.values())
        return own + [buffer for part in self._parts.values() for buffer in part.buffers()]

    def bytes(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Return a buffer of ``num_bytes`` bytes with undefined content."""
        buffer = self._buffers.get((name, device))
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._buffers[name, device] = buffer
        return buffer[:num_bytes]

    def converted(self, name: str, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``flat`` itself if it is of ``dtype``; if not, a buffer with its values, converted."""
        if flat.dtype == dtype:
            return flat
        return self.bytes(name, flat.numel() * dtype.itemsize, flat.device).view(dtype).copy_(flat)
