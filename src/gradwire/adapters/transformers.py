"""gradwire in the ``Trainer`` of Hugging Face Transformers."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from gradwire.adapters.accelerators import is_to_average
from gradwire.adapters.adapted_wire import AdaptedWire
from gradwire.adapters.methods import AveragedGradients, LocalSteps, Method
from gradwire.adapters.packages import import_framework
from gradwire.torch_private import uncompiled

_TrainerCallback: Any = import_framework("transformers", "transformers").TrainerCallback
_utils = import_framework("transformers.trainer_utils", "transformers")

__all__ = ["attach", "attach_local_sgd"]

log = logging.getLogger("gradwire")


def attach(trainer: Any, recipe: Any = "bf16", **options: Any) -> AdaptedWire:
    """Average the gradients of ``trainer.train()`` by ``recipe``; call it on every rank, before ``train()``.

    Args:
        trainer: a ``transformers.Trainer``, or one of a class derived from it.
        recipe: a recipe or hook, as for `gradwire.attach`.
        options: options of `gradwire.attach`. The ``GradScaler`` of ``fp16=True`` is passed to it too.

    Every rank's state is kept in the folder ``gradwire`` of each checkpoint, and loaded by
    ``train(resume_from_checkpoint=...)``. Figures go where the trainer logs. With a single process nothing
    is attached.

    Raises ValueError if there is no such recipe. ``train()`` raises what `gradwire.attach` raises.

    Example::

        trainer = Trainer(model, TrainingArguments(ddp_find_unused_parameters=False), ...)
        wire = attach(trainer, "int4")
        trainer.train()
        print(wire.stats())
    """
    return _adapt(trainer, AveragedGradients(recipe, options))


def attach_local_sgd(trainer: Any, **options: Any) -> AdaptedWire:
    """Let ``trainer.train()`` train by local SGD; call it on every rank, before ``train()``.

    Args:
        trainer: a ``transformers.Trainer``, or one of a class derived from it.
        options: options of `gradwire.LocalSGD`.

    Checkpoints have every rank's parameters and optimizer state.

    Example::

        attach_local_sgd(trainer, period=16, recipe="bf16", outer=gradwire.DiLoCo())
        trainer.train()
    """
    return _adapt(trainer, LocalSteps(options))


def _adapt(trainer: Any, method: Method) -> AdaptedWire:
    wire = AdaptedWire(method)
    callback = _WireCallback(trainer, wire)
    trainer.add_callback(callback)
    train, write_log = trainer.train, trainer.log

    # No callback learns from which checkpoint the trainer resumes.
    @functools.wraps(train)
    def train_from(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        callback.checkpoint = resume_from_checkpoint
        if resume_from_checkpoint is True:
            callback.checkpoint = _utils.get_last_checkpoint(trainer.args.output_dir)
        return train(resume_from_checkpoint, *args, **kwargs)

    # Callbacks that report may come before ours, and the trainer's history comes before all of them.
    @functools.wraps(write_log)
    def log_with_figures(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        write_log({**logs, **wire.metrics()} if "loss" in logs else logs, *args, **kwargs)

    trainer.train, trainer.log = train_from, log_with_figures
    return wire


class _WireCallback(_TrainerCallback):
    """Begins, saves and ends with the trainer's own events, which come on every rank."""

    def __init__(self, trainer: Any, wire: AdaptedWire) -> None:
        self.checkpoint: Any = None
        self._trainer = trainer
        self._wire = wire

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not is_to_average(self._trainer.accelerator):
            return
        model = self._trainer.model_wrapped
        _explain_unused_parameters(uncompiled(model), args)
        self._wire.begin(model, (self._trainer.optimizer,), self._trainer.accelerator.scaler)
        if self.checkpoint:
            self._wire.load(os.path.join(self.checkpoint, "gradwire"), state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wire.count_step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.save_only_model:
            checkpoint = os.path.join(args.output_dir, f"{_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            # A search for hyperparameters has other folders, and does not resume from them.
            if os.path.isdir(checkpoint):
                self._wire.save(os.path.join(checkpoint, "gradwire"), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wire.finish()
        self._wire.end()


def _explain_unused_parameters(ddp: Any, args: Any) -> None:
    if getattr(ddp, "find_unused_parameters", False) and args.ddp_find_unused_parameters is None:
        log.warning(
            "the Trainer has DDP look for unused parameters in every step. If your model uses all of them, "
            "pass ddp_find_unused_parameters=False: steps are faster, and DDP may arrange its buckets better"
        )
