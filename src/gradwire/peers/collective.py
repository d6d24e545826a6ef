"""Calls that every rank of a group makes together."""

from __future__ import annotations

import logging
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist

from gradwire.peers.agreement import Claim, agree
from gradwire.peers.rendezvous import join_rendezvous

if TYPE_CHECKING:
    from typing_extensions import Self


log = logging.getLogger("gradwire")


class CollectiveCall:
    """A call that all ranks make together: they meet, each checks what it can alone, then they agree.

    If a rank raises before `agree`, the other ranks raise with its text, so that none waits for it. That rank
    raises its own error, also if others do not come.

    Example::

        with CollectiveCall(group, timeout, "gradwire.attach") as call:
            ...  # checks that may raise
            call.agree({"recipe": "int4"})
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta, caller: str) -> None:
        self.group = group
        self._timeout = timeout
        self._caller = caller
        self._has_agreed = False
        self.rendezvous = ""
        """A name that is new to the group and the same on all ranks; set on entering the call."""

    def __enter__(self) -> Self:
        self.rendezvous = join_rendezvous(self.group, self._timeout, self._caller)
        return self

    def agree(self, claim: Claim, note: str = "") -> list[str]:
        """Wait for every rank's claim; raise on all ranks unless all claims are the same.

        Returns every rank's ``note``, in rank order; notes may differ.
        """
        self._has_agreed = True
        return agree(self.group, self.rendezvous, claim, self._timeout, self._caller, note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or self._has_agreed:
            return
        try:
            agree(self.group, self.rendezvous, error, self._timeout, self._caller)
        except RuntimeError as missing:  # that others do not come must not hide the error
            log.warning("%s", missing)


class GridCall(CollectiveCall):
    """A collective call of the ranks that average together, and of those that hold the shards of one model.

    Ranks that hold shards agree first. So an error of any rank reaches all.
    """

    def __init__(
        self, group: dist.ProcessGroup, shards: dist.ProcessGroup | None, timeout: timedelta, caller: str
    ) -> None:
        """Call ``caller`` over ``group``, and over those that hold the ``shards``, if there are any."""
        super().__init__(group, timeout, caller)
        self._within = None if shards is None else CollectiveCall(shards, timeout, caller)

    def __enter__(self) -> Self:
        super().__enter__()
        if self._within is not None:
            self._within.__enter__()
        return self

    def agree(self, claim: Claim, note: str = "") -> list[str]:
        """Wait for every rank's claim; raise on all ranks unless all claims are the same.

        Returns the notes of the ranks that average together, in rank order.
        """
        if self._within is not None:
            self._within.agree(claim)
        return super().agree(claim, note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._within is not None:
            self._within.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)
