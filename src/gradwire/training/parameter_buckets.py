"""Buckets of parameters, which local SGD averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.averaging import Bucket, checkpoint
from gradwire.buckets import Layouts
from gradwire.training.outer import Outer

# Values per bucket: few enough that one bucket travels while the next is prepared, many enough that
# the messages are worth their latency.
_BUCKET_NUMEL = 8 << 20


def make_buckets(
    parameters: Sequence[tuple[nn.Parameter, int]], layouts: Layouts, outer: Outer | None
) -> list[ParameterBucket]:
    """Return buckets of consecutive parameters of one dtype and one param group.

    Each parameter comes with the number of its param group.
    """
    runs: list[tuple[int, list[nn.Parameter]]] = []
    for parameter, number in parameters:
        fits = (
            runs
            and runs[-1][0] == number
            and runs[-1][1][0].dtype == parameter.dtype
            and sum(p.numel() for p in runs[-1][1]) + parameter.numel() <= _BUCKET_NUMEL
        )
        if fits:
            runs[-1][1].append(parameter)
        else:
            runs.append((number, [parameter]))
    return [
        ParameterBucket(index, index == len(runs) - 1, number, own, layouts, outer)
        for index, (number, own) in enumerate(runs)
    ]


class ParameterBucket:
    """Parameters that are averaged together, their values at the start of the period, and the momentum."""

    def __init__(
        self,
        index: int,
        is_last: bool,
        param_group: int,
        parameters: Sequence[nn.Parameter],
        layouts: Layouts,
        outer: Outer | None,
    ) -> None:
        self.index, self.parameters, self.param_group = index, list(parameters), param_group
        self._is_last = is_last
        self._outer = outer
        # At least fp32, since this sums many small steps.
        wide = torch.promote_types(parameters[0].dtype, torch.float32)
        self._layout = layouts.make(index, wide, parameters)
        self.start = torch.empty(self._layout.numel, dtype=wide, device=parameters[0].device)
        self.momentum = None if outer is None else torch.zeros_like(self.start)
        for slot, parameter in zip(self._layout.slots, parameters, strict=True):
            slot.view(self.start).copy_(parameter.detach())

    def views(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        return list(self._layout.views(flat).items())

    def pseudo_gradient(self) -> Bucket:
        """Return how far this rank has moved in this period, with the sign reversed, like a gradient."""
        # The period began at `start` rounded to the dtype of the parameters.
        flat = self.start.to(self.parameters[0].dtype).to(self.start.dtype, copy=True)
        for slot, parameter in zip(self._layout.slots, self.parameters, strict=True):
            slot.view(flat).sub_(parameter.detach())
        return Bucket(flat, self._layout, self._is_last)

    def move(self, mean: Tensor, inner_lr: float) -> None:
        """Move by the mean of all ranks, or by what the outer optimizer makes of it."""
        if self._outer is None or self.momentum is None:
            self.start.sub_(mean)
        else:
            self._outer.update(self.start, mean, self.momentum, inner_lr)
        self.write_parameters()

    def write_parameters(self) -> None:
        with torch.no_grad():
            for slot, parameter in zip(self._layout.slots, self.parameters, strict=True):
                parameter.copy_(slot.view(self.start))


def tensors_of(buckets: Sequence[ParameterBucket]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that a checkpoint holds, by kind and parameter."""
    return {
        "start": {name: view for bucket in buckets for name, view in bucket.views(bucket.start)},
        "momentum": {
            name: view
            for bucket in buckets
            if bucket.momentum is not None
            for name, view in bucket.views(bucket.momentum)
        },
    }


def load_tensors(buckets: Sequence[ParameterBucket], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Load what `tensors_of` returned; ValueError, with nothing changed, if it does not fit."""
    own = tensors_of(buckets)
    for key, views in own.items():
        checkpoint.require_tensors(key, saved[key])
        different = views.keys() ^ saved[key].keys()
        different |= {n for n in views.keys() & saved[key].keys() if views[n].shape != saved[key][n].shape}
        if different:
            raise ValueError(
                f"the {key} of this state does not fit: it differs in {sorted(different)[:5]}; "
                "load what was saved with the same parameters, warmup_steps and kind of outer optimizer"
            )
    for key, views in own.items():
        for name, view in views.items():
            view.copy_(saved[key][name])
