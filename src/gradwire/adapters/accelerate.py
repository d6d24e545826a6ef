"""gradwire in a loop with Hugging Face Accelerate."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.adapters.accelerators import is_to_average
from gradwire.adapters.adapted_wire import AdaptedWire
from gradwire.adapters.methods import AveragedGradients, LocalSteps, Method
from gradwire.adapters.packages import import_framework
from gradwire.ddp import is_ddp
from gradwire.sharded import is_sharded
from gradwire.torch_private import uncompiled

import_framework("accelerate", "accelerate")

__all__ = ["attach", "attach_local_sgd"]

_num_wires: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def attach(accelerator: Any, model: nn.Module, recipe: Any = "bf16", **options: Any) -> AdaptedWire:
    """Average the model's gradients by ``recipe``; call it on every rank, before or after ``prepare``.

    Args:
        accelerator: the ``accelerate.Accelerator`` of the loop.
        model: the model that goes to ``accelerator.prepare``, or the one that came from it.
        recipe: a recipe or hook, as for `gradwire.attach`.
        options: options of `gradwire.attach`. The accelerator's ``GradScaler`` is passed to it too.

    ``accelerator.save_state`` keeps every rank's state in the folder ``gradwire`` of its checkpoint, and
    ``accelerator.load_state`` loads it. With a single process nothing is attached.

    Raises TypeError or ValueError as `gradwire.attach` does.

    Example::

        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        wire = attach(accelerator, model, "int4")
        ...
        accelerator.log({"loss": loss, **wire.metrics()}, step=step)
    """
    return _adapt(accelerator, model, (), AveragedGradients(recipe, options))


def attach_local_sgd(accelerator: Any, model: nn.Module, optimizer: Optimizer, **options: Any) -> AdaptedWire:
    """Train by local SGD; call it on every rank, before or after ``prepare``.

    Args:
        accelerator: the ``accelerate.Accelerator`` of the loop.
        model: the model that goes to ``accelerator.prepare``, or the one that came from it.
        optimizer: the model's optimizer, prepared or not.
        options: options of `gradwire.LocalSGD`.

    Call ``step()`` of the result after each step of the optimizer, and ``average()`` at the end. Checkpoints
    have every rank's parameters and optimizer state.

    Example::

        local = attach_local_sgd(accelerator, model, optimizer, period=16, outer=gradwire.DiLoCo())
        ...
        optimizer.step()
        if accelerator.sync_gradients:
            local.step()
    """
    return _adapt(accelerator, model, (optimizer,), LocalSteps(options))


def _adapt(
    accelerator: Any, model: nn.Module, optimizers: tuple[Optimizer, ...], method: Method
) -> AdaptedWire:
    wire = AdaptedWire(method)
    index = _num_wires.get(accelerator, 0)
    _num_wires[accelerator] = index + 1
    if not is_to_average(accelerator):
        return wire
    if is_ddp(uncompiled(model)) or is_sharded(model):
        wire.begin(model, optimizers, accelerator.scaler)
    else:
        _begin_when_prepared(wire, accelerator, model, optimizers)
    _keep_files(wire, accelerator, "gradwire" if index == 0 else f"gradwire_{index}")
    return wire


def _begin_when_prepared(
    wire: AdaptedWire, accelerator: Any, model: nn.Module, optimizers: tuple[Optimizer, ...]
) -> None:
    """Begin as soon as the accelerator has prepared ``model``."""
    # `prepare` calls `prepare_model`, but for FSDP2: there it takes one model, with its optimizer.
    name = "prepare" if accelerator.is_fsdp2 else "prepare_model"
    prepare = getattr(accelerator, name)

    @functools.wraps(prepare)
    def prepare_and_begin(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        if any(each is model for each in (*args, *kwargs.values())):
            made = [prepared] if isinstance(prepared, nn.Module) else prepared
            (after,) = (each for each in made if isinstance(each, nn.Module))
            wire.begin(after, optimizers, accelerator.scaler)
        return prepared

    setattr(accelerator, name, prepare_and_begin)


def _keep_files(wire: AdaptedWire, accelerator: Any, name: str) -> None:
    """Save and load every rank's state with the accelerator's own checkpoints."""
    folder = ""

    def save(_models: Any, _weights: Any, output_dir: str) -> None:
        wire.save(os.path.join(output_dir, name))

    def note(_models: Any, input_dir: str) -> None:
        nonlocal folder
        folder = os.path.join(input_dir, name)

    load_state = accelerator.load_state

    @functools.wraps(load_state)
    def load_all(*args: Any, **kwargs: Any) -> None:
        load_state(*args, **kwargs)
        # Last, since local SGD replaces what the accelerator has loaded by each rank's own.
        wire.load(folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(note)
    accelerator.load_state = load_all
