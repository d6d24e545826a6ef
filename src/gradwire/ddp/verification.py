"""A check that averaged gradients are the same on every rank, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.ddp.gradients import ModelGradients, local_gradient
from gradwire.errors import WireError
from gradwire.peers import Group, gather

_CHUNK = 1 << 20
# The integer dtype to read values of each size as. 64-bit values are read in halves, since two changes of
# bit 63 would cancel out modulo 2**64.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Weights 1 + n * _STRIDE are odd, and so is _CARRY. So every change of a single value changes the hash.
_STRIDE, _CARRY = 0x1E3779B97F4A7C14, 0x1F123BB5159A55E5


def check_interval(verify_every: int) -> None:
    """Raise TypeError or ValueError unless ``verify_every`` is a number of steps, or 0 for never."""
    if isinstance(verify_every, bool) or not isinstance(verify_every, int):
        raise TypeError(f"verify_every must be a number of steps, not {verify_every!r}")
    if verify_every < 0:
        raise ValueError(f"verify_every must be 0 (never) or a number of steps, not {verify_every}")


class Verification:
    """Compare hashes of the gradients over ranks, every so many steps."""

    def __init__(
        self, every: int, gradients: ModelGradients, may_compare: Callable[[], bool] = lambda: True
    ) -> None:
        self._every = every
        self._gradients = gradients
        self._may_compare = may_compare

    def is_due(self, step: int) -> bool:
        return step % self._every == 0 and self._may_compare()

    def hashes(self, *, shadow: bool) -> Tensor:
        """Return a 1 and this rank's hashes; only zeros for a ``shadow`` rank, which is out of input."""
        named = list(self._gradients.trained().items())
        if shadow:
            return torch.zeros(1 + len(named), dtype=torch.int64)
        device = named[0][1].device
        hashes = [_hash(local_gradient(parameter)).to(device) for _, parameter in named]
        return torch.stack([torch.ones_like(hashes[0]), *hashes])

    def conclude(self, step: int, rank: int, everyone: list[list[int]]) -> None:
        """Raise WireError with the first parameter that differs, if `compare` has found a difference."""
        ranks = [r for r, row in enumerate(everyone) if row[0]]
        if len({tuple(everyone[r]) for r in ranks}) < 2:
            return
        names = list(self._gradients.trained())
        bad = [i for i in range(len(names)) if len({everyone[r][1 + i] for r in ranks}) > 1]
        values = [everyone[r][1 + bad[0]] for r in ranks]
        sides = [[r for r, v in zip(ranks, values, strict=True) if v == value] for value in set(values)]
        told = ", another on ".join(
            f"rank(s) {', '.join(map(str, side))}"
            for side in sorted(sides, key=lambda side: (-len(side), side))
        )
        more = f" (as are {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise WireError(
            f"rank {rank}, step {step}: the averaged gradient of {names[bad[0]]}{more} is not the same on "
            f"every rank: one on {told}. Something changed it after it was averaged, or the hook leaves each "
            "rank its own; resume from a checkpoint that is older than the difference"
        )


def compare(hashes: Tensor, group: Group, device: torch.device) -> list[list[int]]:
    """Return every rank's hashes: one hash of them all, or each one if those differ."""
    own = hashes.to(device)
    everyone = _gather(torch.stack([own[0], _hash(own)]), group)
    return everyone if len({tuple(row) for row in everyone if row[0]}) < 2 else _gather(own, group)


def _gather(own: Tensor, group: Group) -> list[list[int]]:
    rows = [torch.zeros_like(own) for _ in range(group.size)]
    rows[group.rank].copy_(own)
    if group.size > 1:
        gather([row.view(torch.uint8) for row in rows], group)
    return [row.tolist() for row in rows]


@torch.no_grad()
def _hash(values: Tensor | None) -> Tensor:
    """Return a hash of all bits and their places, a weighted sum modulo 2**64.

    >>> _hash(torch.tensor([1.0, 2.0])) == _hash(torch.tensor([2.0, 1.0]))
    tensor(False)
    """
    if values is None:
        return torch.zeros((), dtype=torch.int64)
    if values.is_sparse:
        values = values.coalesce()
        return _hash(values.indices()) * _CARRY + _hash(values.values())
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.contiguous().reshape(-1).view(_BITS[values.element_size()])
    weights = torch.arange(min(_CHUNK, bits.numel()), device=bits.device).mul_(_STRIDE).add_(1)
    total = torch.ones((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = total * _CARRY + (chunk * weights[: chunk.numel()]).sum()
    return total
