"""The state that sites without the newest one take from a site that has it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gradwire.sharded import local_values
from gradwire.training.fragments import Fragment, broadcast, buckets_of
from gradwire.training.newest_state import Newest
from gradwire.training.outer_loop import OuterLoop
from gradwire.training.sites import Site

log = logging.getLogger("gradwire")

Share = Callable[[Tensor], None]
"""Replace a tensor by that of the site with the newest state; collective."""


def share_state(site: Site, loop: OuterLoop | None, found: Newest) -> None:
    """Replace the outer state, and what is not averaged, by the source's; collective.

    A site without the newest state goes on from the last average. Others keep what ranks have of their own:
    parameters and buffers. After an error, no means are under way: those of this site may not have come.
    """
    if found.is_apart:
        log.warning(
            "rank %d: this site has as many averages as that of rank %d, but others: the two trained apart. "
            "This one takes the parameters of the other. Let one group train at a time",
            site.group.rank(),
            found.source,
        )
    share = functools.partial(broadcast, group=site.group, source=found.source, device=site.device)
    fragments = [] if loop is None else loop.fragments
    averaged = {id(p) for bucket in buckets_of(fragments) for p in bucket.parameters}
    others = [*(p for p in site.module.parameters() if id(p) not in averaged), *site.module.buffers()]
    try:
        _share_outer_state(fragments, share)
        _share_others(others, share, takes_values=not found.is_current)
    except Exception:
        for fragment in fragments:
            fragment.give_up()
        raise
    if not found.is_current:  # last: with a part of them, a site whose source is lost could not go on
        _take_parameters(fragments)


def _share_outer_state(fragments: Sequence[Fragment], share: Share) -> None:
    """Replace the last average, the momentum and the means under way."""
    for fragment in fragments:
        tensors: list[Tensor] = fragment.wait() if fragment.is_under_way else []
        tensors += [bucket.start for bucket in fragment.buckets]
        tensors += [bucket.momentum for bucket in fragment.buckets if bucket.momentum is not None]
        for tensor in tensors:
            share(tensor)


def _take_parameters(fragments: Iterable[Fragment]) -> None:
    """Go on from the last average."""
    for bucket in buckets_of(fragments):
        bucket.write_parameters()
        if bucket.begun is not None:
            bucket.note_parameters()


@torch.no_grad()
def _share_others(others: Iterable[Tensor], share: Share, *, takes_values: bool) -> None:
    """Take the buffers, and the parameters that are not averaged."""
    for tensor in others:
        own = local_values(tensor)
        copy = own.clone()
        share(copy)
        if takes_values:
            own.copy_(copy)
