"""gradwire in Lightning's ``Trainer``: a strategy, or a callback beside a strategy of the user's.

Serves ``lightning.pytorch``, and ``pytorch_lightning`` if that was imported first.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

from gradwire.adapters.adapted_wire import AdaptedWire
from gradwire.adapters.lightning_files import folder_of, remove_folder
from gradwire.adapters.methods import AveragedGradients, LocalSteps, Method
from gradwire.adapters.packages import import_framework

_uses_mirror = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_pl = import_framework("pytorch_lightning" if _uses_mirror else "lightning.pytorch", "lightning")
_DDPStrategy: Any = _pl.strategies.DDPStrategy
_Callback: Any = _pl.Callback

__all__ = ["LocalSGDStrategy", "WireCallback", "WireStrategy"]


class _AdaptedStrategy(_DDPStrategy):
    """``DDPStrategy`` with a method of gradwire's on the model that it makes."""

    def __init__(self, method: Method, ddp_options: Mapping[str, Any]) -> None:
        for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"):
            if ddp_options.get(name) is not None:
                raise ValueError(
                    f"{type(self).__name__} registers its own hook: leave {name} out. To run a hook of yours "
                    "through gradwire, pass it instead of the recipe"
                )
        super().__init__(**ddp_options)
        self.wire = AdaptedWire(method)
        """The wire, once training has begun."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self.wire.begin(self.model, self.optimizers, _scaler_of(self))
            if not any(isinstance(callback, _LogFigures) for callback in trainer.callbacks):
                trainer.callbacks.insert(0, _LogFigures(self.wire))

    def on_train_start(self) -> None:
        super().on_train_start()
        _resume(self.wire, self.lightning_module.trainer)

    def on_train_end(self) -> None:
        super().on_train_end()
        self.wire.finish()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        _save(self.wire, _resumable_step(checkpoint), filepath)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove_folder(filepath)

    def teardown(self) -> None:
        self.wire.end()
        super().teardown()


class WireStrategy(_AdaptedStrategy):
    """Lightning's ``DDPStrategy`` with gradients averaged by a recipe: ``Trainer(strategy=...)``.

    Args:
        recipe: a recipe or hook, as for `gradwire.attach`.
        on_nonfinite, verify_every, telemetry: options of `gradwire.attach`. A ``GradScaler`` of the
            precision plugin is passed to it too.
        ddp_options: arguments of ``DDPStrategy``, such as ``find_unused_parameters``, ``timeout`` or
            ``process_group_backend``.

    Every rank's state is kept in a folder beside each checkpoint, ``NAME.ckpt.gradwire``, and loaded by
    ``trainer.fit(model, ckpt_path=...)``. Figures go to the trainer's loggers.

    Example::

        trainer = Trainer(devices=2, strategy=WireStrategy("int4"))
        trainer.fit(model)
        print(trainer.strategy.wire.stats())
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


class LocalSGDStrategy(_AdaptedStrategy):
    """Lightning's ``DDPStrategy`` with local SGD: ranks average parameters every few optimizer steps.

    Args:
        period, warmup_steps, recipe, gradient_recipe, outer: options of `gradwire.LocalSGD`.
        ddp_options: arguments of ``DDPStrategy``.

    A checkpoint in the middle of a period has rank 0's parameters. Each rank's own, and its optimizer's
    state, are in the folder beside it, so that a resumed run goes on exactly.

    Example::

        strategy = LocalSGDStrategy(period=16, recipe="bf16", outer=gradwire.DiLoCo())
        Trainer(devices=2, strategy=strategy).fit(model)
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

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self.wire.count_step()
        return result


class _LogFigures(_Callback):
    """Logs the figures of a wire when the trainer logs."""

    def __init__(self, wire: AdaptedWire) -> None:
        self.wire = wire

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        every = trainer.log_every_n_steps
        if every and trainer.global_step % every == 0:
            pl_module.log_dict(self.wire.metrics())


class WireCallback(_LogFigures):
    """A recipe on the model of any strategy that makes a ``DistributedDataParallel``, or shards by FSDP2.

    Args:
        recipe: a recipe or hook, as for `gradwire.attach`.
        options: options of `gradwire.attach`.

    Checkpoints and figures are those of `WireStrategy`.

    Example::

        trainer = Trainer(devices=2, strategy=MyDDPStrategy(), callbacks=[WireCallback("int4")])
    """

    def __init__(self, recipe: Any = "bf16", **options: Any) -> None:
        super().__init__(AdaptedWire(AveragedGradients(recipe, options)))
        self._strategy: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.wire.begin(trainer.strategy.model, trainer.optimizers, _scaler_of(trainer.strategy))
        if self._strategy is not trainer.strategy:
            self._strategy = trainer.strategy
            self._keep_files(trainer.strategy)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _resume(self.wire, trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.wire.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.wire.end()

    def _keep_files(self, strategy: Any) -> None:
        """Extend the methods of the strategy that save and remove checkpoints: callbacks get no path."""
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        @functools.wraps(save)
        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> None:
            step = _resumable_step(checkpoint)  # first: a strategy that shards takes states out of it
            save(checkpoint, filepath, *args, **kwargs)
            _save(self.wire, step, filepath)

        @functools.wraps(remove)
        def remove_checkpoint(filepath: Any) -> None:
            remove(filepath)
            if strategy.is_global_zero:
                remove_folder(filepath)

        strategy.save_checkpoint, strategy.remove_checkpoint = save_checkpoint, remove_checkpoint


def _resumable_step(checkpoint: Mapping[str, Any]) -> int | None:
    """Return the step of a checkpoint; None if it has only weights, from which nobody resumes."""
    return checkpoint["global_step"] if "optimizer_states" in checkpoint else None


def _save(wire: AdaptedWire, step: int | None, filepath: str | os.PathLike[str]) -> None:
    if step is not None:
        wire.save(folder_of(filepath), step)


def _resume(wire: AdaptedWire, trainer: Any) -> None:
    if trainer.ckpt_path:
        wire.load(folder_of(trainer.ckpt_path), trainer.global_step)


def _scaler_of(strategy: Any) -> Any:
    """Return the ``GradScaler`` of the strategy's precision plugin; None without one."""
    return getattr(strategy.precision_plugin, "scaler", None)
