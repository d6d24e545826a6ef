"""One model, trained by several virtual workers with a recipe between them."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.testing import VirtualRanks
from optimizers import OPTIMIZERS
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
        self.optimizer = OPTIMIZERS[setting.optimizer](list(self.model.parameters()))
        self._sent_before = 0
        shape = (setting.steps, setting.workers, setting.batch)
        # Draw all places at once, since each transfer waits for the device.
        self.places = self.data.draw(shape, seed)
        self.backward = self.graphed() if self.device.type == "cuda" and not eager else self.backward_of

    def backward_of(self, places: Tensor) -> None:
        loss_of(self.model, self.data, places).backward()

    def graphed(self) -> Callable[[Tensor], None]:
        """Record `backward_of` as a CUDA graph: its 600 small kernels take longer to launch than to run."""
        parameters = list(self.model.parameters())
        gradients = [torch.zeros_like(p) for p in parameters]
        places = self.places[0, 0].clone()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.backward_of(places)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch._foreach_zero_(gradients)
            self.backward_of(places)

        def replay(new_places: Tensor) -> None:
            places.copy_(new_places)
            graph.replay()
            torch._foreach_copy_([p.grad for p in parameters if p.grad is not None], gradients)

        return replay

    @property
    def num_steps(self) -> int:
        return self.ranks.num_steps

    def step(self) -> None:
        step = self.num_steps
        for rank in range(self.setting.workers):
            with self.ranks.backward_of(rank):
                self.backward(self.places[step, rank])
        self.ranks.average()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.setting.steps, self.setting.lr)
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
