"""Drop-in for ``torch.distributed.algorithms.ddp_comm_hooks``: the same names, arguments and meanings."""

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from gradwire.attachment import attach
from gradwire.ddp_comm_hooks import debugging_hooks as debugging
from gradwire.ddp_comm_hooks import default_hooks as default
from gradwire.ddp_comm_hooks import powerSGD_hook as powerSGD
from gradwire.ddp_comm_hooks import quantization_hooks as quantization

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]


def _attach(
    *, comm_hook: Callable[..., Any], model: nn.Module, state: dist.ProcessGroup | None = None
) -> None:
    attach(model, comm_hook, state=state)


def _attach_low_rank(
    *,
    comm_hook: Callable[..., Any],
    matrix_approximation_rank: int,
    model: nn.Module,
    state: dist.ProcessGroup | None = None,
) -> None:
    attach(model, comm_hook, state=powerSGD.PowerSGDState(state, matrix_approximation_rank))


def _member(comm_hook: Callable[..., Any], rank: int | None = None) -> Any:
    """A partial as an enum's value; from Python 3.11 on it must say that it is no method."""
    value = functools.partial(_attach, comm_hook=comm_hook)
    if rank is not None:
        value = functools.partial(_attach_low_rank, comm_hook=comm_hook, matrix_approximation_rank=rank)
    return enum.member(value) if hasattr(enum, "member") else value


class DDPCommHookType(enum.Enum):
    """The hooks by name; each value is called as ``value(model=..., state=...)``."""

    ALLREDUCE = _member(default.allreduce_hook)
    FP16_COMPRESS = _member(default.fp16_compress_hook)
    BF16_COMPRESS = _member(default.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _member(quantization.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _member(quantization.quantization_perchannel_hook)
    POWER_SGD = _member(powerSGD.powerSGD_hook, rank=1)
    POWER_SGD_RANK2 = _member(powerSGD.powerSGD_hook, rank=2)
    BATCHED_POWER_SGD = _member(powerSGD.batched_powerSGD_hook, rank=1)
    BATCHED_POWER_SGD_RANK2 = _member(powerSGD.batched_powerSGD_hook, rank=2)
    NOOP = _member(debugging.noop_hook)


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: nn.Module, state: dist.ProcessGroup | None = None
) -> None:
    """Attach a hook to a ``DistributedDataParallel``, over the model's own process group.

    Args:
        comm_hook_type: which hook.
        model: the model; `gradwire.attach` says which kinds, and what is refused.
        state: None or the model's process group; another group raises ValueError, since torch would
            average over it in silence.

    Example::

        register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, model)
    """
    comm_hook_type.value(model=model, state=state)
