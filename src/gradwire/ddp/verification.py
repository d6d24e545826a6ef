"""A check that averaged gradients and parameters are the same on every rank, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwire.ddp.gradients import ModelGradients, local_gradient, local_part
from gradwire.errors import WireError
from gradwire.peers import Group, gather_rows

_CHUNK = 1 << 20
# The integer dtype to read values of each size as. 64-bit values are read in halves, since two changes of
# bit 63 would cancel out modulo 2**64.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Weights 1 + n * _STRIDE are odd, and so is _CARRY. So every change of a single value changes the hash.
_STRIDE, _CARRY = 0x1E3779B97F4A7C14, 0x1F123BB5159A55E5

_GRADIENT = "the averaged gradient of "
_ADVICE = {
    True: "Something changed it after it was averaged, or the hook leaves each rank its own",
    False: "Ranks have diverged: since then, one has changed gradients after backward() (clipped them, say), "
    "skipped an optimizer step, loaded other values, or has other options in its optimizer",
}


def check_interval(verify_every: int) -> None:
    """Raise TypeError or ValueError unless ``verify_every`` is a number of steps, or 0 for never."""
    if isinstance(verify_every, bool) or not isinstance(verify_every, int):
        raise TypeError(f"verify_every must be a number of steps, not {verify_every!r}")
    if verify_every < 0:
        raise ValueError(f"verify_every must be 0 (never) or a number of steps, not {verify_every}")


@dataclass(frozen=True)
class _Copied:
    """Every rank's hashes on their way from the device to the host."""

    step: int
    rank: int
    names: Sequence[int]
    rows: Tensor
    arrived: torch.cuda.Event


class Verification:
    """Compare hashes of gradients and parameters over ranks, every so many steps.

    Both are compared at the end of a backward pass. Parameters are then those that the last optimizer step
    has left, so a gradient that was changed after its backward pass, on one rank, is found there.
    """

    def __init__(
        self, every: int, gradients: ModelGradients, may_compare: Callable[[], bool] = lambda: True
    ) -> None:
        self._every = every
        self._gradients = gradients
        self._may_compare = may_compare
        self._copied: _Copied | None = None
        self._last_good: int | None = None

    def is_due(self, step: int) -> bool:
        return step % self._every == 0 and self._may_compare()

    def hashes(self, *, shadow: bool) -> Tensor:
        """Return a 1 and this rank's hashes; only zeros for a ``shadow`` rank, which is out of input."""
        values = [value for _, value in self._values()]
        device = next(iter(self._gradients.trained().values())).device
        if shadow:
            return torch.zeros(1 + len(values), dtype=torch.int64, device=device)
        hashes = [_hash(value).to(device) for value in values]
        return torch.stack([torch.ones_like(hashes[0]), *hashes])

    def compare(self, hashes: Tensor, step: int, rank: int, group: Group, device: torch.device) -> None:
        """Compare ``hashes`` with those of all ranks of ``group``; raise WireError if they differ.

        On CUDA, only start to copy them to the host: `conclude` compares them, a step later.
        """
        own = hashes.to(device)
        if own.is_cuda:
            rows = gather_rows(own, group).to("cpu", non_blocking=True)
            arrived = torch.cuda.current_stream(device).record_event()
            self._copied = _Copied(step, rank, group.names, rows, arrived)
            return
        everyone = gather_rows(torch.stack([own[0], _hash(own)]), group)
        # Ranks that are out of input have no hashes.
        if len({tuple(row) for row in everyone.tolist() if row[0]}) > 1:
            self._require_same(step, rank, group.names, gather_rows(own, group))
        self._last_good = step

    def conclude(self) -> None:
        """Raise WireError if hashes that `compare` has copied differ."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.arrived.synchronize()  # no wait in practice: a whole step lies between
            self._require_same(copied.step, copied.rank, copied.names, copied.rows)
            self._last_good = copied.step

    def _require_same(self, step: int, rank: int, names: Sequence[int], rows: Tensor) -> None:
        """Raise WireError with the first gradient or parameter that differs, if one does.

        ``names`` has the ranks of the world, in the order of ``rows``.
        """
        everyone: list[list[int]] = rows.tolist()
        ranks = [r for r, row in enumerate(everyone) if row[0]]
        bad = [
            (name, [everyone[r][number] for r in ranks])
            for number, (name, _) in enumerate(self._values(), start=1)
            if len({everyone[r][number] for r in ranks}) > 1
        ]
        if not bad:
            return
        name, hashes = bad[0]
        sides = [
            [names[r] for r, v in zip(ranks, hashes, strict=True) if v == value] for value in set(hashes)
        ]
        told = ", another on ".join(
            f"rank(s) {', '.join(map(str, side))}"
            for side in sorted(sides, key=lambda side: (-len(side), side))
        )
        more = f" (as are {len(bad) - 1} more)" if len(bad) > 1 else ""
        since = "no earlier step was compared"
        if self._last_good is not None:
            since = f"all were the same at step {self._last_good}"
        raise WireError(
            f"rank {rank}, step {step}: {name}{more} is not the same on every rank: one on {told}. "
            f"{since[0].upper()}{since[1:]}. {_ADVICE[name.startswith(_GRADIENT)]}; resume from a checkpoint "
            "that is older than the difference"
        )

    def _values(self) -> list[tuple[str, Tensor | None]]:
        """Return what is compared: averaged gradients, then all parameters, each with a name for errors."""
        trained, shared = self._gradients.trained(), self._gradients.shared()
        gradients = [(f"{_GRADIENT}{name}", local_gradient(p)) for name, p in trained.items()]
        return [*gradients, *((f"parameter {name}", local_part(p.detach())) for name, p in shared.items())]


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


def hash_of_parameters(parameters: Mapping[str, nn.Parameter]) -> str:
    """Return a hash of all bits of the model's parameters, as 16 hexadecimal digits."""
    hashes = [_hash(local_part(parameter.detach())).cpu() for parameter in parameters.values()]
    return f"{_hash(torch.stack(hashes)).item() % 2**64:016x}"
