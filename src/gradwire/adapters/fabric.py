"""gradwire in Lightning's ``Fabric``: a strategy.

Serves ``lightning.fabric``, and ``lightning_fabric`` if that was imported first.
"""

from __future__ import annotations

import sys
from typing import Any

from gradwire.adapters.adapted_wire import AdaptedWire
from gradwire.adapters.lightning_files import folder_of
from gradwire.adapters.methods import AveragedGradients
from gradwire.adapters.packages import import_framework

_uses_mirror = "lightning_fabric" in sys.modules and "lightning.fabric" not in sys.modules
_DDPStrategy: Any = import_framework(
    "lightning_fabric.strategies" if _uses_mirror else "lightning.fabric.strategies", "lightning"
).DDPStrategy

__all__ = ["WireStrategy"]


class WireStrategy(_DDPStrategy):
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
        super().__init__(**ddp_options)
        options = {"on_nonfinite": on_nonfinite, "verify_every": verify_every, "telemetry": telemetry}
        self._method = AveragedGradients(recipe, options)
        self._path: Any = None
        self.wires: list[AdaptedWire] = []
        """The wires of the modules that were set up, in their order."""

    def setup_module(self, module: Any) -> Any:
        model = super().setup_module(module)
        wire = AdaptedWire(self._method)
        wire.begin(model, grad_scaler=getattr(self.precision, "scaler", None))
        self.wires.append(wire)
        if self._path is not None:  # the checkpoint was loaded before the module was set up
            wire.load(folder_of(self._path, len(self.wires) - 1))
        return model

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
