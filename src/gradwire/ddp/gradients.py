"""A model's averaged gradients, for the checks that follow a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.models import may_exchange_after_backward, shared_parameters, trained_parameters


class ModelGradients(Protocol):
    """The parameters of a model whose gradients are averaged. Holds the model weakly: its hooks hold this."""

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters whose gradients are averaged, by name, in the same order on every rank."""
        ...

    def shared(self) -> dict[str, nn.Parameter]:
        """Return all parameters that are the same on every rank, frozen ones too, by name."""
        ...

    def clear(self) -> None:
        """Set every gradient of the model to None."""
        ...


class DDPGradients:
    """The gradients of a ``DistributedDataParallel``."""

    def __init__(self, ddp: Callable[[], DistributedDataParallel | None]) -> None:
        """Take a weak reference to the model."""
        self._ref = ddp

    def trained(self) -> dict[str, nn.Parameter]:
        # Parameters that DDP ignores differ between ranks, and would make ranks decide differently.
        return trained_parameters(self._ddp)

    def shared(self) -> dict[str, nn.Parameter]:
        return shared_parameters(self._ddp)

    def clear(self) -> None:
        for parameter in self._ddp.module.parameters():
            parameter.grad = None

    def may_compare(self) -> bool:
        """Return False if ranks may not compare gradients after this pass."""
        return may_exchange_after_backward(self._ddp)

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._ref()
        assert ddp is not None, "the model is gone"
        return ddp


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient, or this rank's shard of it; None if there is none."""
    return None if parameter.grad is None else local_part(parameter.grad)


def local_part(values: Any) -> Tensor:
    """Return this rank's shard of a ``DTensor``, and any other tensor as it is."""
    local: Tensor = values.to_local() if hasattr(values, "to_local") else values
    return local
