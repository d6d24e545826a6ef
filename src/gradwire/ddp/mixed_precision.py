"""DDP's ``mixed_precision=`` with our averaging.

With that option, DDP registers its own hook, and there is no second slot. The hook casts a bucket to
``reduce_dtype``, lets the reducer sum it, divides, and restores full-precision parameters and gradients. It
finds the reducer and the process group through a weak reference in its state. So we keep the hook, and
replace the reference by one to a stand-in: see `replace_reducer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire.buckets import Layouts
from gradwire.torch_private import GradBucket, replace_reducer

Run = Callable[[GradBucket], "Future[Tensor]"]


def supports_events() -> bool:
    """Return True if this machine has the events that DDP's ``mixed_precision=`` needs; CPUs have none."""
    try:
        torch.Event().record()
    except RuntimeError:
        return False
    return True


def average_by(ddp: DistributedDataParallel, run: Run) -> None:
    """Let DDP's own mixed-precision hook average by ``run``."""
    replace_reducer(ddp, functools.partial(_average, run))


def _average(run: Run, bucket: GradBucket) -> Future[Tensor]:
    """Average in place, since DDP's hook reads the bucket and not the future."""
    local, parameters = bucket.buffer(), bucket.parameters()
    layout = Layouts().make(bucket.index(), local.dtype, parameters)
    # torch 2.13 passes buckets without the gradients: in the first step, and with gradient_as_bucket_view
    # from the third step on. The parameters hold them.
    for slot, parameter in zip(layout.slots, parameters, strict=True):
        gradient = parameter.grad
        slot.view(local).copy_(gradient if gradient is not None else torch.zeros_like(parameter))

    def keep(done: Future[Tensor]) -> Tensor:
        result = done.value()
        return local if result.data_ptr() == local.data_ptr() else local.copy_(result)

    averaged: Future[Tensor] = run(bucket).then(keep)
    return averaged
