"""gradwire in Lightning's ``Fabric``: strategies.

Serves ``lightning.fabric``, and ``lightning_fabric`` if that was imported first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from gradwire.adapters.adapted_wire import AdaptedWire
from gradwire.adapters.lightning_files import folder_of
from gradwire.adapters.methods import AveragedGradients, LocalSteps, Method
from gradwire.adapters.packages import import_framework

_uses_mirror = "lightning_fabric" in sys.modules and "lightning.fabric" not in sys.modules
_DDPStrategy: Any = import_framework(
    "lightning_fabric.strategies" if _uses_mirror else "lightning.fabric.strategies", "lightning"
).DDPStrategy

__all__ = ["LocalSGDStrategy", "WireStrategy"]


class _AdaptedStrategy(_DDPStrategy):
    """Fabric's ``DDPStrategy`` with a method of gradwire's on the modules that are set up."""

    def __init__(self, method: Method, ddp_options: Mapping[str, Any]) -> None:
        super().__init__(**ddp_options)
        self._method = method
        self._path: Any = None
        self.wires: list[AdaptedWire] = []
        """The wires of the modules that were set up, in their order."""

    def save_checkpoint(self, path: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(path, state, *args, **kwargs)
        for index, wire in enumerate(self.wires):
            wire.save(folder_of(path, index))

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        if state:
            self._path = path
            for index, wire in enumerate(self.wires):
                wire.load(folder_of(path, index))
        return rest

    def metrics(self) -> dict[str, float]:
        """Return figures for a logger, each over the steps since the last call; those of the first module."""
        return self.wires[0].metrics() if self.wires else {}

    def _begin(self, model: Any, optimizers: Sequence[Optimizer] = ()) -> None:
        wire = AdaptedWire(self._method)
        wire.begin(model, optimizers, getattr(self.precision, "scaler", None))
        self.wires.append(wire)
        if self._path is not None:  # the checkpoint was loaded before the module was set up
            wire.load(folder_of(self._path, len(self.wires) - 1))


class WireStrategy(_AdaptedStrategy):
    """Fabric's ``DDPStrategy`` with gradients averaged by a recipe: ``Fabric(strategy=...)``.

    Args:
        recipe: a recipe or hook, as for `gradwire.attach`.
        on_nonfinite, verify_every, telemetry: options of `gradwire.attach`.
        ddp_options: arguments of Fabric's ``DDPStrategy``.

    ``fabric.save`` keeps every rank's state in a folder beside the checkpoint, ``NAME.gradwire``, and
    ``fabric.load`` loads it. Log ``fabric.strategy.metrics()`` with ``fabric.log_dict``.

    Example::

        fabric = Fabric(devices=2, strategy=WireStrategy("int4"))
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        print(fabric.strategy.wires[0].stats())
    """

    def __init__(
        self,
        recipe: Any = "bf16",
        *,
        on_nonfinite: str = "propagate",
        verify_every: int = 0,
        telemetry: Any = None,
        **ddp_options: Any,
    ) -> None:
        options = {"on_nonfinite": on_nonfinite, "verify_every": verify_every, "telemetry": telemetry}
        super().__init__(AveragedGradients(recipe, options), ddp_options)

    def setup_module(self, module: Any) -> Any:
        model = super().setup_module(module)
        self._begin(model)
        return model


class LocalSGDStrategy(_AdaptedStrategy):
    """Fabric's ``DDPStrategy`` with local SGD: ranks average parameters every few optimizer steps.

    Args:
        period, warmup_steps, recipe, gradient_recipe, outer: options of `gradwire.LocalSGD`.
        ddp_options: arguments of Fabric's ``DDPStrategy``.

    Call ``fabric.strategy.average()`` at the end of training. Checkpoints have each rank's parameters and
    optimizer state, in the folder of `WireStrategy`.

    Example::

        fabric = Fabric(devices=2, strategy=LocalSGDStrategy(period=16, outer=gradwire.DiLoCo()))
    """

    def __init__(
        self,
        *,
        period: int,
        warmup_steps: int = 0,
        recipe: Any = None,
        gradient_recipe: Any = None,
        outer: Any = None,
        **ddp_options: Any,
    ) -> None:
        options = {"period": period, "warmup_steps": warmup_steps, "recipe": recipe}
        options |= {"gradient_recipe": gradient_recipe, "outer": outer}
        super().__init__(LocalSteps(options), ddp_options)
        self._model: Any = None
        self._optimizers: list[Optimizer] = []

    def setup_module(self, module: Any) -> Any:
        self._model = super().setup_module(module)
        return self._model

    def setup_optimizer(self, optimizer: Optimizer) -> Any:
        optimizer = super().setup_optimizer(optimizer)
        if self._model is None:
            raise ValueError(
                "local SGD takes one optimizer for each module: set up a module with its optimizer"
            )
        self._begin(self._model, (optimizer,))
        self._optimizers.append(optimizer)
        self._model = None
        return optimizer

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, **kwargs)
        for own, wire in zip(self._optimizers, self.wires, strict=True):
            if own is optimizer:
                wire.count_step()
        return result

    def average(self) -> None:
        """Average the steps since the last averaging, so that all ranks end alike; collective."""
        for wire in self.wires:
            wire.finish()
