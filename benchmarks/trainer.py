"""One model, trained by several virtual workers with a recipe between them."""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from branches import Repeated, record_branches
from gradwire.testing import VirtualRanks
from optimizers import LearningRate, make_optimizer
from runs import Setting
from tasks import Data, loss_of, model_of

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_lm import learning_rate

BUCKET_MB = 64.0


class Trainer:
    """A model, its optimizer, and the state of its workers: everything a run resumes from."""

    saves_on_the_way = True

    def __init__(
        self, setting: Setting, recipe: str, seed: int, data: tuple[Data, Data], eager: bool
    ) -> None:
        self.data, self.held_out = data
        self.device = self.data.device
        self.setting = setting
        torch.manual_seed(seed)
        self.model = model_of(setting).to(self.device)
        # A CUDA graph hides the order in which gradients arrive. Give it, so that buckets are the same.
        arrival = [name for name, _ in self.model.named_parameters()][::-1]
        self.ranks = VirtualRanks(
            self.model, recipe, setting.workers, bucket_cap_mb=BUCKET_MB, arrival=arrival
        )
        parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(setting.optimizer, parameters, self.ranks.recipe)
        self._lr = LearningRate([self.optimizer], self.device)
        self._sent_before = 0
        shape = (setting.steps, setting.workers, setting.batch)
        # Draw all places at once, since each transfer waits for the device.
        self.places = self.data.draw(shape, seed)
        is_graphed = self.device.type == "cuda" and not eager
        self.backward = self._graphed() if is_graphed else self._backward
        self._update = Repeated(self._clip_and_step) if is_graphed else self._clip_and_step

    def _backward(self, step: int) -> None:
        for rank in range(self.setting.workers):
            with self.ranks.backward_of(rank):
                loss_of(self.model, self.data, self.places[step, rank]).backward()

    def _graphed(self) -> Callable[[int], None]:
        """Record the backward passes of all workers as one CUDA graph."""
        parameters, places = dict(self.model.named_parameters()), self.places[0].clone()

        def write_gradients(rank: int) -> None:
            loss = loss_of(self.model, self.data, places[rank])
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            views = self.ranks.gradients(rank)
            torch._foreach_copy_([views[name] for name in parameters], gradients)

        ranks = range(self.setting.workers)
        replay = record_branches([functools.partial(write_gradients, rank) for rank in ranks])

        def backward(step: int) -> None:
            places.copy_(self.places[step])
            replay()
            self.ranks.take_gradients()

        return backward

    @property
    def num_steps(self) -> int:
        return self.ranks.num_steps

    def step(self) -> None:
        step = self.num_steps
        self.backward(step)
        self.ranks.average()
        self._lr.set(learning_rate(step, self.setting.steps, self.setting.lr))
        self._update()

    def _clip_and_step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def evaluate(self, num_places: int) -> float:
        places = self.held_out.draw((num_places,), 0)
        with torch.no_grad():
            losses = [loss_of(self.model, self.held_out, part) for part in places.split(64)]
        return float(torch.stack(losses).mean())

    @property
    def bytes_sent(self) -> int:
        """Bytes that the busiest worker has sent."""
        return self._sent_before + max(traffic.bytes_sent for traffic in self.ranks.traffic)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ranks": self.ranks.state_dict(),
            "bytes_sent": self.bytes_sent,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ranks.load_state_dict(state["ranks"])
        self._sent_before = state["bytes_sent"]
