"""The two ways in which ranks train together: gradients averaged by a recipe, and local SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

import gradwire
from gradwire.ddp import Wire, unwrap
from gradwire.training import LocalSGD


class Running(Protocol):
    """A method that runs on a model."""

    @property
    def handle(self) -> Wire | LocalSGD:
        """The wire, or the local SGD."""

    def count_step(self) -> None:
        """Note that the optimizer has taken a step; collective."""

    def finish(self) -> None:
        """Bring all ranks to the same parameters at the end of training; collective."""

    def state(self) -> dict[str, Any]:
        """Return this rank's state: plain tensors and numbers."""

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's state, or those of all ranks of a run with another number of ranks; collective."""


class Method(Protocol):
    """A choice of method and options, made before there is a model."""

    @property
    def kind(self) -> str:
        """A name for errors and for files."""

    def start(
        self, model: nn.Module, optimizers: Sequence[Optimizer], grad_scaler: GradScaler | None
    ) -> Running:
        """Start on a model; collective."""


@dataclass(frozen=True)
class AveragedGradients:
    """Gradients averaged by a recipe or a hook, with the options of `gradwire.attach`.

    Raises ValueError if there is no such recipe.
    """

    recipe: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    kind = "a wire"

    def __post_init__(self) -> None:
        if isinstance(self.recipe, str):
            gradwire.recipe(self.recipe)

    def start(
        self, model: nn.Module, optimizers: Sequence[Optimizer], grad_scaler: GradScaler | None
    ) -> Running:
        options = dict(self.options)
        if grad_scaler is not None and isinstance(self.recipe, str | gradwire.Recipe):
            options.setdefault("grad_scaler", grad_scaler)
        return _RunningWire(gradwire.attach(model, self.recipe, **options))


class _RunningWire:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    @property
    def handle(self) -> Wire:
        return self._wire

    def count_step(self) -> None:
        """Nothing to do: a wire averages in the backward pass."""

    def finish(self) -> None:
        """Nothing to do: ranks have the same parameters after every step."""

    def state(self) -> dict[str, Any]:
        return self._wire.state_dict()

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._wire.load_state_dict(states[0] if len(states) == 1 else gradwire.merge_state_dicts(states))


@dataclass(frozen=True)
class LocalSteps:
    """Parameters averaged every few steps, with the options of `gradwire.LocalSGD`."""

    options: Mapping[str, Any]
    kind = "local SGD"

    def start(
        self, model: nn.Module, optimizers: Sequence[Optimizer], grad_scaler: GradScaler | None
    ) -> Running:
        if len(optimizers) != 1:
            raise ValueError(f"local SGD takes one optimizer, and this run has {len(optimizers)}")
        (optimizer,) = optimizers
        return _RunningLocalSGD(LocalSGD(model, optimizer, **self.options), model, optimizer)


class _RunningLocalSGD:
    """Local SGD on a model.

    Between two averagings, parameters and the optimizer's state differ between ranks, and frameworks save
    those of rank 0 alone. So each rank's state has its own.
    """

    def __init__(self, local: LocalSGD, model: nn.Module, optimizer: Optimizer) -> None:
        self._local = local
        self._module = unwrap(model).module
        self._optimizer = optimizer

    @property
    def handle(self) -> LocalSGD:
        return self._local

    def count_step(self) -> None:
        self._local.step()

    def finish(self) -> None:
        self._local.average()

    def state(self) -> dict[str, Any]:
        return {
            "local": self._local.state_dict(),
            "tensors": {name: tensor.detach() for name, tensor in self._tensors().items()},
            "optimizer": self._optimizer.state_dict(),
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        own = states[0]
        if len(states) > 1:
            # Parameters and optimizer stay as the framework has loaded them: those of rank 0.
            parts = {
                part: gradwire.merge_state_dicts([state["local"][part] for state in states])
                for part in ("averaging", "wire")
            }
            self._local.load_state_dict({**own["local"], **parts})
            return
        self._local.load_state_dict(own["local"])
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(own["tensors"][name])
        self._optimizer.load_state_dict(own["optimizer"])

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
