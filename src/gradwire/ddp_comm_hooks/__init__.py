"""Drop-in for ``torch.distributed.algorithms.ddp_comm_hooks``: the same names, arguments and meanings.

Hooks that torch does not have belong to `recipes`; `attach` is in `ddp`.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from gradwire.ddp import HookTaken, attach
from gradwire.ddp_comm_hooks import debugging_hooks as debugging
from gradwire.ddp_comm_hooks import default_hooks as default
from gradwire.ddp_comm_hooks import optimizer_overlap_hooks as optimizer_overlap  # noqa: F401 (torch's name)
from gradwire.ddp_comm_hooks import powerSGD_hook as powerSGD
from gradwire.ddp_comm_hooks import quantization_hooks as quantization

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]


def _attach(
    *, comm_hook: Callable[..., Any] | str, model: nn.Module, state: dist.ProcessGroup | None = None
) -> None:
    _attach_once(model, comm_hook, state)


def _attach_low_rank(
    *,
    comm_hook: Callable[..., Any],
    matrix_approximation_rank: int,
    model: nn.Module,
    state: dist.ProcessGroup | None = None,
    start_powerSGD_iter: int = 1_000,  # noqa: N803
) -> None:
    if state is not None and not isinstance(state, dist.ProcessGroup):
        raise TypeError(
            f"the state of a POWER_SGD type is a process group or None, not {type(state).__name__}; with a "
            "PowerSGDState of your own, use gradwire.attach(model, powerSGD_hook, state=...)"
        )
    own = powerSGD.PowerSGDState(state, matrix_approximation_rank, start_powerSGD_iter)
    _attach_once(model, comm_hook, own)


def _attach_once(model: nn.Module, comm_hook: Callable[..., Any] | str, state: object) -> None:
    try:
        attach(model, comm_hook, state=state)
    except HookTaken as error:
        raise HookTaken(f"register_ddp_comm_hook can only be called once for a model: {error}") from None


def _member(comm_hook: Callable[..., Any] | str) -> Any:
    """Return the enum value that attaches a hook or a recipe."""
    return _value(functools.partial(_attach, comm_hook=comm_hook))


def _low_rank_member(comm_hook: Callable[..., Any], rank: int) -> Any:
    return _value(functools.partial(_attach_low_rank, comm_hook=comm_hook, matrix_approximation_rank=rank))


def _value(attach_to: Callable[..., None]) -> Any:
    """Mark a callable as an enum member: from Python 3.11 on it would count as a method otherwise."""
    return enum.member(attach_to) if hasattr(enum, "member") else attach_to


class DDPCommHookType(enum.Enum):
    """Hooks by name; call a value as ``value(model=..., state=...)``.

    The low-rank members also take ``start_powerSGD_iter``, the number of first steps that are not compressed.
    torch's hooks come first, then recipes that torch does not have, with their default options.
    """

    ALLREDUCE = _member(default.allreduce_hook)
    FP16_COMPRESS = _member(default.fp16_compress_hook)
    BF16_COMPRESS = _member(default.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _member(quantization.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _member(quantization.quantization_perchannel_hook)
    POWER_SGD = _low_rank_member(powerSGD.powerSGD_hook, rank=1)
    POWER_SGD_RANK2 = _low_rank_member(powerSGD.powerSGD_hook, rank=2)
    BATCHED_POWER_SGD = _low_rank_member(powerSGD.batched_powerSGD_hook, rank=1)
    BATCHED_POWER_SGD_RANK2 = _low_rank_member(powerSGD.batched_powerSGD_hook, rank=2)
    NOOP = _member(debugging.noop_hook)
    INT8 = _member("int8")
    FP8 = _member("fp8")
    INT4 = _member("int4")
    INT3 = _member("int3")
    INT2 = _member("int2")
    SIGN = _member("sign")
    TOPK = _member("topk")
    ACP = _member("acp")


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: nn.Module, state: dist.ProcessGroup | None = None
) -> None:
    """Attach a hook to a ``DistributedDataParallel``, over the model's own process group.

    Args:
        comm_hook_type: the hook to attach.
        model: the model; `gradwire.attach` lists the kinds it takes, and the errors it raises.
        state: None or the model's process group. Another group raises ValueError; torch would silently
            average over it.

    Raises RuntimeError if the model has a hook already, and TypeError for another type of hook, such as
    torch's own.

    Example::

        register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, model)
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise TypeError(
            "comm_hook_type is a gradwire.ddp_comm_hooks.DDPCommHookType, such as "
            f"DDPCommHookType.FP16_COMPRESS, not {_described(comm_hook_type)}"
        )
    comm_hook_type.value(model=model, state=state)


def _described(found: object) -> str:
    """Return what somebody has passed for a type of hook, and what to do instead."""
    if isinstance(found, enum.Enum):
        return f"{type(found).__module__}.{found}: import the name from gradwire.ddp_comm_hooks"
    if callable(found):
        return "a hook: give that to model.register_comm_hook, or to gradwire.attach(model, hook)"
    return repr(found)
