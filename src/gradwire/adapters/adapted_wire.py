"""The handle of a run inside a framework: it begins when the framework has made its model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradwire.adapters.figures import Figures
from gradwire.adapters.methods import Method, Running
from gradwire.adapters.state_files import StateFolder
from gradwire.peers import CollectiveCall, timeout_of

log = logging.getLogger("gradwire")


class AdaptedWire:
    """A `gradwire.Wire`, or a `gradwire.LocalSGD`, on a model that a framework makes later.

    Once the model is there, this has every method and property of the wire: ``stats()``, ``plan()``,
    ``swap()`` and so on. Until then those raise RuntimeError.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self._running: Running | None = None
        self._figures = Figures()

    @property
    def has_begun(self) -> bool:
        """True once the framework's model is attached to."""
        return self._running is not None

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        grad_scaler: GradScaler | None = None,
    ) -> None:
        """Start on ``model``; collective. A wire on an earlier model is detached."""
        self.end()
        self._running = None
        self._running = self._method.start(model, optimizers, grad_scaler)
        self._figures = Figures()

    def finish(self) -> None:
        """End training: local SGD averages the steps since the last averaging; collective."""
        if self._running is not None:
            self._running.finish()

    def end(self) -> None:
        """Detach from the model; statistics remain."""
        if self._running is not None:
            self._running.handle.detach()

    def count_step(self) -> None:
        """Note that the optimizer has taken a step; local SGD may average then."""
        if self._running is not None:
            self._running.count_step()

    def metrics(self) -> dict[str, float]:
        """Return figures for a logger, each over the steps since the last call; empty before the first step.

        They are ``gradwire/bytes_sent``, ``wait_ms`` and ``work_ms`` of a step, ``wait_share`` (the part of
        the time in which exchanges waited for other ranks), ``total_bytes_sent`` and ``skipped_steps``. With
        ``telemetry=`` come ``relative_error``, ``gradient_norm`` and ``residual_norm``.
        """
        if self._running is None:
            return {}
        stats = self._running.handle.stats()
        return self._figures.read(stats) if stats.num_steps else {}

    def save(self, folder: str, step: int | None = None) -> None:
        """Write this rank's state to ``folder``, on every rank; nothing before the model is there."""
        if self._running is not None:
            state = self._running.state()
            self._folder(folder, step).write(state, dist.get_rank(), dist.get_world_size())

    def load(self, folder: str, step: int | None = None) -> None:
        """Load the ranks' states from ``folder``; collective.

        A folder that does not exist belongs to a checkpoint made without gradwire: log a warning, and go on.
        Raises ValueError on every rank if a file is missing, foreign, or does not fit.
        """
        if self._running is None:
            return
        world = dist.group.WORLD
        assert world is not None
        with CollectiveCall(world, timeout_of(world), "to resume with gradwire") as call:
            states = self._folder(folder, step).read(world.rank(), world.size())
            call.agree({f"the folder {folder}": "missing" if states is None else "there"})
        if states is not None:
            self._running.load(states)
        elif world.rank() == 0:
            log.warning(
                "the checkpoint has no folder %s: it was made without gradwire, or was copied without that "
                "folder. Training goes on, and nothing that ranks may have held back is restored",
                folder,
            )

    def _folder(self, path: str, step: int | None) -> StateFolder:
        return StateFolder(path, self._method.kind, step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._running is None:
            raise RuntimeError(
                f"{name!r} is not there yet: the framework has made no distributed model in this process so "
                "far. Train with more than one process, and ask after training has begun, in a process that "
                "trains: launchers for notebooks train in other processes"
            )
        return getattr(self._running.handle, name)
