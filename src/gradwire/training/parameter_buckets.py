"""Buckets of parameters, which local SGD averages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from gradwire.averaging import Bucket
from gradwire.buckets import BucketLayout
from gradwire.sharded import local_values
from gradwire.training.inner_optimizer import Numbered
from gradwire.training.outer import Outer

# Values per bucket: few enough that one bucket travels while the next is prepared, many enough that
# the messages are worth their latency.
_BUCKET_NUMEL = 8 << 20


class MakesLayouts(Protocol):
    """Layouts of buckets that hold a model's parameters, or its shards of them."""

    def make(self, index: int, dtype: torch.dtype, parameters: Sequence[Tensor]) -> BucketLayout:
        """Return the layout of a bucket; ValueError if it cannot hold one of the parameters."""
        ...


def runs_of(parameters: Sequence[Numbered], layouts: MakesLayouts) -> list[list[Numbered]]:
    """Return runs of consecutive parameters of one dtype and one param group, each a bucket in size."""
    runs: list[list[Numbered]] = []
    numel = 0
    for parameter, number in parameters:
        own = layouts.make(0, parameter.dtype, [parameter]).numel
        numel += own
        is_alike = runs and (runs[-1][0][1], runs[-1][0][0].dtype) == (number, parameter.dtype)
        if is_alike and numel <= _BUCKET_NUMEL:
            runs[-1].append((parameter, number))
        else:
            runs.append([(parameter, number)])
            numel = own
    return runs


class ParameterBucket:
    """Parameters that are averaged together, their values at the start of the period, and the momentum."""

    def __init__(
        self,
        index: int,
        is_last: bool,
        run: Sequence[Numbered],
        layouts: MakesLayouts,
        outer: Outer | None,
        offload: bool = False,
    ) -> None:
        """Keep copies of the parameters of ``run``; with ``offload``, in host memory."""
        self.index, self.param_group = index, run[0][1]
        self.parameters = [parameter for parameter, _ in run]
        self._is_last = is_last
        self._outer = outer
        first = self.parameters[0]
        self._device = first.device
        self.is_offloaded = offload and first.is_cuda
        # At least fp32, since this sums many small steps.
        wide = torch.promote_types(first.dtype, torch.float32)
        self._layout = layouts.make(index, wide, self.parameters)
        self.start = torch.zeros(  # shards may end with padding
            self._layout.numel,
            dtype=wide,
            device="cpu" if self.is_offloaded else first.device,
            pin_memory=self.is_offloaded,  # so that copies do not wait
        )
        self.begun: Tensor | None = None
        """This rank's parameters when the averaging under way began, if its steps since are to be kept."""
        self.momentum = None
        if outer is not None:
            self.momentum = torch.zeros_like(self.start, pin_memory=self.is_offloaded)
        for _, parameter, view in self.places(self.start):
            view.copy_(local_values(parameter))

    def places(self, flat: Tensor) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield each parameter's name, the parameter, and the values in ``flat`` that are this rank's."""
        for slot, parameter in zip(self._layout.slots, self.parameters, strict=True):
            without_padding = tuple(map(slice, local_values(parameter).shape))
            yield slot.name, parameter, slot.view(flat)[without_padding]

    def pseudo_gradient(self) -> Bucket:
        """Return how far this rank has moved in this period, with the sign reversed, like a gradient."""
        # The period began at `start` rounded to the dtype of the parameters.
        start = self._on_device(self.start)
        flat = start.to(self.parameters[0].dtype).to(start.dtype, copy=True)
        for _, parameter, view in self.places(flat):
            view.sub_(local_values(parameter))
        return Bucket(flat, self._layout, self._is_last)

    def note_parameters(self) -> None:
        """Keep a copy of the parameters, so that `move` keeps the steps taken from now on."""
        # On the device also with offload: it is the part of the model whose mean is there too.
        self.begun = torch.zeros(self._layout.numel, dtype=self.start.dtype, device=self._device)
        for _, parameter, view in self.places(self.begun):
            view.copy_(local_values(parameter))

    def move(
        self,
        mean: Tensor,
        inner_lr: float,
        alpha: float = 0.0,
        *,
        plainly: bool = False,
        applies: Tensor | None = None,
    ) -> None:
        """Move by what the outer optimizer makes of the mean of all ranks; ``plainly``, by the mean itself.

        Parameters keep their steps since `note_parameters`, or the share ``alpha`` of what they are. If
        ``applies`` is given, and False on the device, nothing changes.
        """
        self._clear_padding(mean)
        start = self._on_device(self.start)
        if self._outer is None or self.momentum is None or plainly:
            with _only_if(applies, start):
                start.sub_(mean)
        else:
            momentum = self._on_device(self.momentum)
            with _only_if(applies, start, momentum):
                self._outer.update(start, mean, momentum, inner_lr)
            if self.is_offloaded:
                self.momentum.copy_(momentum, non_blocking=True)
        if self.is_offloaded:
            self.start.copy_(start, non_blocking=True)
        if self.begun is not None:
            self._write_with_steps(start, self.begun, applies)
            self.begun = None
        else:
            self._write(start, alpha, applies)

    def write_parameters(self) -> None:
        """Set the parameters to their values at the start of the period."""
        self._write(self._on_device(self.start), 0.0)

    def _clear_padding(self, mean: Tensor) -> None:
        """Set the padding of shards to zero: a state does not hold it, and a rotation leaves errors there."""
        for slot, parameter in zip(self._layout.slots, self.parameters, strict=True):
            values, own_shape = slot.view(mean), local_values(parameter).shape
            for dim, (size, own_size) in enumerate(zip(slot.shape, own_shape, strict=True)):
                if own_size < size:
                    values.narrow(dim, own_size, size - own_size).zero_()

    def _on_device(self, kept: Tensor) -> Tensor:
        return kept.to(self._device, non_blocking=True) if self.is_offloaded else kept

    def _write(self, start: Tensor, alpha: float, applies: Tensor | None = None) -> None:
        for _, parameter, view in self.places(start):
            own = local_values(parameter)
            with _only_if(applies, own):
                own.copy_(torch.lerp(view, own.to(view.dtype), alpha) if alpha else view)

    def _write_with_steps(self, start: Tensor, begun: Tensor, applies: Tensor | None) -> None:
        """Set the parameters to ``start``, and add how far they have come from ``begun``."""
        for (_, parameter, view), (_, _, before) in zip(self.places(start), self.places(begun), strict=True):
            own = local_values(parameter)
            with _only_if(applies, own):
                own.copy_((own.to(view.dtype) - before).add_(view))


@contextlib.contextmanager
def _only_if(applies: Tensor | None, *changed: Tensor) -> Iterator[None]:
    """Undo what the block changes if ``applies`` is False, on the device, so that the host need not wait."""
    if applies is None:
        yield
        return
    before = [each.clone() for each in changed]
    yield
    for each, kept in zip(changed, before, strict=True):
        each.copy_(torch.where(applies, each, kept))
