"""Means by torch's own all-reduce, for buckets that travel as they are."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.errors import Place

Record = Callable[[Place, int, int, float, float], None]
"""Takes a bucket's bytes, messages, and seconds of waiting and working."""


class NativeMean:
    """The all-reduce of a group, as DDP takes it without a hook: nothing of a lane stands in its way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # torch keeps it until it is destroyed

    def start(self, flat: Tensor, place: Place, record: Record) -> Future[Tensor]:
        """Begin to average ``flat`` in place; ``record`` what it has sent, once it is done."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this wire has been destroyed; attach again")
        size, begin_s = group.size(), time.perf_counter()
        work = dist.all_reduce(flat.div_(size), group=group, async_op=True)
        assert work is not None
        num_bytes = 2 * (size - 1) * flat.numel() * flat.element_size() // size

        def take(done: Future[Any]) -> Tensor:
            result: Tensor = done.value()[0]
            record(place, num_bytes, 2 * (size - 1), time.perf_counter() - begin_s, 0.0)
            return result

        future: Future[Tensor] = work.get_future().then(take)
        return future
