"""The buckets that ``DistributedDataParallel`` would make of a model: which parameters go into which."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from gradwire.buckets import BucketLayout, Layouts, trainable_parameters
from gradwire.torch_private import FIRST_BUCKET_BYTES, compute_bucket_assignment

_DEFAULT_CAP_MB = 25.0


class DDPBuckets:
    """The buckets that DDP would give to a model, at first and once they are rebuilt.

    They come from the function of torch that DDP itself calls.
    """

    def __init__(self, model: nn.Module, bucket_cap_mb: float | None = None) -> None:
        self._model = model
        self._parameters = list(trainable_parameters(model).values())
        cap = int((_DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * 2**20)
        # By default the first bucket is small, so that something is sent early.
        self._limits = [FIRST_BUCKET_BYTES if bucket_cap_mb is None else cap, cap]

    def one(self) -> tuple[BucketLayout, ...]:
        """Return the buckets of the first step: one for each dtype."""
        found, _ = compute_bucket_assignment(list(self._parameters), [sys.maxsize])
        return self._layouts(found[::-1])

    def declared(self) -> tuple[BucketLayout, ...]:
        """Return the buckets of a model with unused parameters, which are never rebuilt."""
        found, _ = compute_bucket_assignment(list(self._parameters), self._limits)
        return self._layouts(found[::-1])

    def rebuilt(self, arrived: Iterable[nn.Parameter] = ()) -> tuple[BucketLayout, ...]:
        """Return the buckets of later steps, after gradients have arrived in this order.

        Parameters whose gradients have not arrived come last, the last parameter first. So without
        ``arrived``, these are the buckets of a backward pass that runs from the end of the model.
        """
        number = {id(p): i for i, p in enumerate(self._parameters)}
        order = list(dict.fromkeys([*(number[id(p)] for p in arrived), *reversed(number.values())]))
        tensors: list[Tensor] = [self._parameters[i] for i in order]
        dense = [False] * len(order)
        found, _ = compute_bucket_assignment(tensors, self._limits, dense, order)
        return self._layouts(found)

    def _layouts(self, buckets: Sequence[Sequence[int]]) -> tuple[BucketLayout, ...]:
        layouts, found = Layouts(self._model), []
        for index, own in enumerate(buckets):
            parameters = [self._parameters[number] for number in own]
            first = parameters[0].dtype
            found.append(layouts.make(index, first.to_real() if first.is_complex else first, parameters))
        return tuple(found)
