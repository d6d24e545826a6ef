"""The inner optimizer of local SGD: the parameters that it trains, and their learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

Numbered = tuple[nn.Parameter, int]
"""A parameter, and the number of its param group."""


@dataclass(frozen=True)
class InnerOptimizer:
    """An optimizer that steps a model between averagings; it may have parameters of other models too."""

    module: nn.Module
    optimizer: Optimizer

    def parameters(self) -> list[Numbered]:
        """Return the parameters of the model that the optimizer trains; ValueError if there are none.

        Raises TypeError if the optimizer is none.
        """
        if not hasattr(self.optimizer, "param_groups"):
            raise TypeError(f"optimizer is a torch.optim.Optimizer, not {type(self.optimizer).__name__}")
        own = {id(parameter) for parameter in self.module.parameters()}
        found = [
            (parameter, number)
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in own and parameter.requires_grad
        ]
        if not found:
            raise ValueError(
                "the optimizer holds no parameter of the model: there is nothing to average; "
                "make it from the model's parameters"
            )
        return found

    def lr_of(self, param_group: int) -> float:
        """Return the learning rate of a param group; 1 for an optimizer that has none."""
        return float(self.optimizer.param_groups[param_group].get("lr", 1.0))
