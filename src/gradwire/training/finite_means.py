"""Averages that are not finite: found before they are sent on CPU, and after that on a GPU.

Values of one rank that are not finite would be in the average and in the momentum of all ranks, for good. On
CPU a rank looks at its own values, and sends nothing. On a GPU the host would wait for that look. But a value
that is not finite on one rank makes the mean so on all of them. So all ranks look at the mean, on the device,
and move by it only if it is finite. The host reads the result when the next averaging begins, or before, when
a state is saved or sites regroup: residuals then hold steps that are still to be averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.training.site_ranks import SiteRanks


def looks_first(values: Tensor) -> bool:
    """Return True if a rank looks at values before it sends them, and not at the mean."""
    return not values.is_cuda


def is_finite(values: Tensor) -> bool:
    """Return True if all values are finite, by one pass over them."""
    return not values.numel() or bool(torch.linalg.vector_norm(values, torch.inf).isfinite())


class FiniteMeans:
    """Looks at means on their device, for the host to read later."""

    def __init__(self) -> None:
        self._were_finite = True
        self._unread: tuple[Tensor, torch.cuda.Event | None] | None = None
        """The last flag on its way to the host, and the event after which it is there."""

    def look(self, means: Sequence[Tensor], ranks: SiteRanks) -> Tensor | None:
        """Return a flag on the device, True if all means are finite; None if ranks have looked before.

        Collective in a site, whose ranks have other parts of the model: all move, or none.
        """
        if not means or looks_first(means[0]):
            return None
        true = torch.ones((), dtype=torch.bool, device=means[0].device)  # for means without values
        flags = [torch.linalg.vector_norm(mean, torch.inf).isfinite() for mean in means if mean.numel()]
        flag = ranks.all_of(torch.stack([true, *flags]).all())
        copied, event = flag.to("cpu", non_blocking=True), None
        if flag.is_cuda:
            event = torch.cuda.current_stream(flag.device).record_event()
        self.were_finite()  # reads the flag before
        self._unread = copied, event
        return flag

    def were_finite(self) -> bool:
        """Return True if all means have been finite so far, or since `forget`."""
        if self._unread is not None:
            flag, event = self._unread
            if event is not None:
                event.synchronize()  # no wait in practice: a whole averaging lies between
            self._were_finite = self._were_finite and bool(flag)
            self._unread = None
        return self._were_finite

    def forget(self) -> None:
        """Forget the means so far, which have been told of."""
        self._were_finite, self._unread = True, None
