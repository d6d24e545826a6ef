"""Calls that all ranks of all sites make together."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from gradwire.peers import Claim, CollectiveCall

MIXED = "different notes"
"""The note of a site whose ranks have different ones."""


class SitesCall(CollectiveCall):
    """A collective call of the ranks that average together, and of the ranks of each site.

    Ranks of a site agree first. So an error of any rank reaches all.
    """

    def __init__(
        self, group: dist.ProcessGroup, shards: dist.ProcessGroup | None, timeout: timedelta, caller: str
    ) -> None:
        """Call ``caller`` over ``group``, and over the ``shards`` of this site if there are any."""
        super().__init__(group, timeout, caller)
        self._within = None if shards is None else CollectiveCall(shards, timeout, caller)

    def __enter__(self) -> SitesCall:
        super().__enter__()
        if self._within is not None:
            self._within.__enter__()
        return self

    @property
    def site_name(self) -> str:
        """A name that the ranks of this site share, and that is new; other sites may have it too."""
        return self.rendezvous if self._within is None else self._within.rendezvous

    def agree(self, claim: Claim, note: str = "") -> list[str]:
        """Wait for every rank's claim; raise on all ranks unless all claims are the same.

        Returns the note of each site: that of its ranks, or `MIXED` if theirs differ.
        """
        if self._within is None:
            return super().agree(claim, note)
        notes = self._within.agree(claim, note)
        shards = self._within.group
        # A group of other ranks than those that hold one shard would average different parameters.
        where = {"the shard": f"{shards.rank()} of {shards.size()}"}
        return super().agree({**claim, **where}, note if len(set(notes)) == 1 else MIXED)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._within is not None:
            self._within.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)
