"""A sharded model as watches of optimizers see it."""

from __future__ import annotations

import weakref

from torch.optim.optimizer import Optimizer

from gradwire.sharded.backward import Backward
from gradwire.sharded.model import ShardedModel


class WatchedShards:
    """A sharded model and what averages it, neither of which a watch keeps alive."""

    def __init__(self, model: ShardedModel, backward: Backward) -> None:
        self._model, self._backward = model, weakref.ref(backward)
        self._is_left = False
        self.rank = model.recorded_rank

    def leave(self) -> None:
        """Note that the model is averaged by torch again."""
        self._is_left = True

    @property
    def is_attached(self) -> bool:
        """True while the model has its wire."""
        return not self._is_left and self._model.exists and self._backward() is not None

    @property
    def wire_name(self) -> str:
        """The name of the recipe."""
        backward = self._backward()
        return "" if backward is None else backward.engine.name

    @property
    def holds_gradients(self) -> bool:
        """True if a recipe holds gradients back, or has held some back."""
        backward = self._backward()
        return backward is not None and backward.engine.state.memory.holds_gradients

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer has gradients of the model."""
        own = {id(each.parameter) for each in self._model.trained()}
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(id(p) in own and p.grad is not None for p in parameters)
