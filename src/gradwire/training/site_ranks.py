"""The ranks of one site, and what they decide together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import WireError
from gradwire.sharded import true_on_all


class SiteRanks(Protocol):
    """The ranks of one site, as one of them sees them."""

    @property
    def rank(self) -> int:
        """The number of this rank among those of all sites."""
        ...

    def failure(self, own: WireError | None, *, may_ask: bool) -> WireError | None:
        """Return the failure of any rank of this site; others are asked only if they all ``may_ask`` now."""
        ...

    def total(self, work: float) -> float:
        """Return the work of all ranks of this site; collective there."""
        ...

    def any_of(self, flag: bool) -> bool:
        """Return True if the flag is True on any rank of this site; collective there."""
        ...

    def all_of(self, flag: Tensor) -> Tensor:
        """Return, on its device, if the flag is True on all ranks of this site; collective there."""
        ...


@dataclass
class OneRank:
    """The only rank of a site: there is nobody to ask."""

    rank: int

    def failure(self, own: WireError | None, *, may_ask: bool) -> WireError | None:
        return own

    def total(self, work: float) -> float:
        return work

    def any_of(self, flag: bool) -> bool:
        return flag

    def all_of(self, flag: Tensor) -> Tensor:
        return flag


@dataclass
class ShardRanks:
    """Ranks that hold the shards of one model. Each averages with other ranks than the others do."""

    rank: int
    group: dist.ProcessGroup
    device: torch.device
    share_failure: Callable[[WireError | None], WireError | None]
    """Tells all ranks of the site of a failure, and returns the first of theirs."""
    known_failure: WireError | None = field(default=None, init=False)

    def failure(self, own: WireError | None, *, may_ask: bool) -> WireError | None:
        if self.known_failure is None and may_ask:
            self.known_failure = self.share_failure(own)
        return self.known_failure

    def total(self, work: float) -> float:
        values = torch.tensor(work, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, group=self.group)
        return float(values)

    def any_of(self, flag: bool) -> bool:
        return self.total(float(flag)) > 0

    def all_of(self, flag: Tensor) -> Tensor:
        return true_on_all(flag, self.group)
