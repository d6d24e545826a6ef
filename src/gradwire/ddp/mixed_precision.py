"""DDP's ``mixed_precision=`` with an averaging of ours.

DDP then registers a hook of its own, which casts a bucket to ``reduce_dtype``, lets the reducer sum it,
divides, and restores full-precision parameters and gradients; there is no second slot. That hook finds
reducer and process group through a reference in its state. So the hook stays, and the reference is
replaced by one to a stand-in whose reducer averages as we do, in a group of one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire.buckets import Layouts

Run = Callable[[GradBucket], "Future[Tensor]"]


def has_events() -> bool:
    """Whether this machine has what DDP's ``mixed_precision=`` waits with: CPU streams have none."""
    try:
        torch.Event().record()
    except RuntimeError:
        return False
    return True


def take_over(ddp: DistributedDataParallel, run: Run) -> None:
    """Let DDP's own mixed-precision hook average by ``run``."""
    state: Any = ddp._comm_hooks[0][1]
    state.ddp_weakref = functools.partial(_stand_in, weakref.ref(ddp), run)


def _stand_in(ddp: weakref.ref[DistributedDataParallel], run: Run) -> SimpleNamespace:
    model = ddp()
    assert model is not None, "a hook is called by its model's reducer alone"
    return SimpleNamespace(
        reducer=SimpleNamespace(_run_allreduce_hook=functools.partial(_average, run)),
        process_group=SimpleNamespace(size=lambda: 1),  # to divide by: we have divided
        mixed_precision=model.mixed_precision,
        module=model.module,
    )


def _average(run: Run, bucket: GradBucket) -> Future[Tensor]:
    """Average in place: DDP's hook looks at the bucket, not at the future."""
    local = bucket.buffer()
    # torch 2.13 hands out buckets that miss gradients: at the first step all of them, and with
    # gradient_as_bucket_view from the third step on. The parameters have them.
    for slot, parameter in zip(Layouts().of(bucket).slots, bucket.parameters(), strict=True):
        gradient = parameter.grad
        slot.view(local).copy_(gradient if gradient is not None else torch.zeros_like(parameter))

    def keep(done: Future[Tensor]) -> Tensor:
        result = done.value()
        return local if result.data_ptr() == local.data_ptr() else local.copy_(result)

    averaged: Future[Tensor] = run(bucket).then(keep)
    return averaged
