"""Calls that all ranks of all sites make together."""

from __future__ import annotations

from gradwire.peers import Claim, CollectiveCall, GridCall

MIXED = "different notes"
"""The note of a site whose ranks have different ones."""


class SitesCall(GridCall):
    """A collective call of the ranks that average together, and of the ranks of each site."""

    @property
    def site_name(self) -> str:
        """A name that the ranks of this site share, and that is new; other sites may have it too."""
        return self.rendezvous if self._within is None else self._within.rendezvous

    def agree(self, claim: Claim, note: str = "") -> list[str]:
        """Wait for every rank's claim; raise on all ranks unless all claims are the same.

        Returns the note of each site: that of its ranks, or `MIXED` if theirs differ.
        """
        if self._within is None:
            return CollectiveCall.agree(self, claim, note)
        notes = self._within.agree(claim, note)
        shards = self._within.group
        # A group of other ranks than those that hold one shard would average different parameters.
        called = "the shard (sites= takes the ranks that hold the same one)"
        where = {called: f"{shards.rank()} of {shards.size()}"}
        return CollectiveCall.agree(self, {**claim, **where}, note if len(set(notes)) == 1 else MIXED)
