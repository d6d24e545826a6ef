"""DDP's ``mixed_precision=`` with our averaging.

With that option, DDP registers its own hook, and there is no second slot. The hook casts a bucket to
``reduce_dtype``, lets the reducer sum it, divides, and restores full-precision parameters and gradients. It
finds the reducer and the process group through a weak reference in its state. So we keep the hook, and
replace the reference by one to a stand-in. The stand-in's reducer averages as we do, in a group of one rank.
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


def supports_events() -> bool:
    """Return True if this machine has the events that DDP's ``mixed_precision=`` needs; CPUs have none."""
    try:
        torch.Event().record()
    except RuntimeError:
        return False
    return True


def average_by(ddp: DistributedDataParallel, run: Run) -> None:
    """Let DDP's own mixed-precision hook average by ``run``."""
    state: Any = ddp._comm_hooks[0][1]
    state.ddp_weakref = functools.partial(_stand_in, weakref.ref(ddp), run)


def _stand_in(ddp: weakref.ref[DistributedDataParallel], run: Run) -> SimpleNamespace:
    model = ddp()
    assert model is not None, "only the model's reducer calls its hook"
    return SimpleNamespace(
        reducer=SimpleNamespace(_run_allreduce_hook=functools.partial(_average, run)),
        # DDP divides by this size; our average is divided already.
        process_group=SimpleNamespace(size=lambda: 1),
        mixed_precision=model.mixed_precision,
        module=model.module,
    )


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
