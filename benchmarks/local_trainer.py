"""Models, one for each of several workers in this process, averaged by local SGD."""

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from branches import Repeated, record_branches
from gradwire.averaging import Bucket
from gradwire.buckets import Layouts, Memory
from gradwire.errors import Place, WireError
from gradwire.exchanges import Context, Scratch, average
from gradwire.lanes import Promise
from gradwire.peers import Group, Traffic
from gradwire.recipes import Recipe, resolve_for_module
from gradwire.testing import run_virtual_ranks
from gradwire.training.fragments import load_tensors, make_fragments, tensors_of
from gradwire.training.inner_optimizer import InnerOptimizer
from gradwire.training.local_choices import streaming_of
from gradwire.training.local_state import Turn
from gradwire.training.outer_loop import Members, OuterLoop
from gradwire.training.site_ranks import OneRank
from gradwire.training.turns import make_turns
from local_rows import parse
from optimizers import OPTIMIZERS, LearningRate
from runs import Setting
from tasks import Data, loss_of, model_of

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_lm import learning_rate


class VirtualAveraging:
    """One worker's side of averagings: buckets wait until all workers have started theirs."""

    failure = None

    def __init__(self, recipe: Recipe) -> None:
        self.name = str(recipe)
        self.memory, self.scratch = Memory(), Scratch()
        self.started: list[tuple[Bucket, Place, Promise]] = []
        self._exchange = recipe.exchange

    def start(self, bucket: Bucket, place: Place) -> Future[Tensor]:
        promise = Promise(bucket.flat)
        self.started.append((bucket, place, promise))
        return promise.future

    def fail(self, error: WireError) -> None:
        raise error

    def run(self, group: Group) -> Traffic:
        """Average what has been started; all workers call this."""
        for bucket, place, promise in self.started:
            scale = 1 / group.size
            context = Context(group, self.scratch, scale, bucket.layout, self.memory, place.step)
            promise.keep(average(bucket.flat, self._exchange, context))
        self.started.clear()
        return group.traffic


class Worker:
    """A model of its own, its optimizer, and its outer loop."""

    def __init__(self, model: nn.Module, setting: Setting, name: str, rank: int) -> None:
        row = parse(name)
        assert row is not None
        self.model = model
        self.optimizer = OPTIMIZERS[setting.optimizer](list(model.parameters()))
        named = dict(model.named_parameters())
        self.averaging = VirtualAveraging(resolve_for_module(row.recipe, model, named, setting.workers))
        streaming = streaming_of(row.outer)
        inner = InnerOptimizer(model, self.optimizer)
        fragments = make_fragments(inner.parameters(), Layouts(model), row.outer)
        turns = make_turns(row.period, streaming.num_fragments)
        members = Members(self.averaging, OneRank(rank))
        self.loop = OuterLoop(members, fragments, turns, streaming, inner)
        self.gradients = [torch.zeros_like(parameter) for parameter in named.values()]
        for parameter, gradient in zip(named.values(), self.gradients, strict=True):
            parameter.grad = gradient

    def inner_step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": self.averaging.memory.state_dict(),
            "turn": self.loop.turn.save(),
            **tensors_of(self.loop.fragments),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.averaging.memory.load_state_dict(state["memory"], next(self.model.parameters()).device)
        self.loop.go_on(Turn.read(state["turn"]))
        load_tensors(self.loop.fragments, state)


class LocalTrainer:
    """Workers with models of their own, and everything a run resumes from."""

    saves_on_the_way = False
    """A checkpoint has a model and an optimizer for each worker, too much to write at each evaluation."""

    def __init__(self, setting: Setting, name: str, seed: int, data: tuple[Data, Data], eager: bool) -> None:
        self.data, self.held_out = data
        self.setting = setting
        row = parse(name)
        assert row is not None
        self._peak = row.inner_lr or setting.lr
        self._ends_apart = streaming_of(row.outer).streams or setting.steps % row.period > 0
        torch.manual_seed(seed)
        device = self.data.device
        first = model_of(setting).to(device)
        models = [first, *(copy.deepcopy(first) for _ in range(setting.workers - 1))]
        self.model = copy.deepcopy(first)
        """The mean of the workers' parameters, for evaluations."""
        self.workers = [Worker(model, setting, name, rank) for rank, model in enumerate(models)]
        shape = (setting.steps, setting.workers, setting.batch)
        self.places = self.data.draw(shape, seed)
        is_graphed = device.type == "cuda" and not eager
        self._backward = self._graphed() if is_graphed else self._backward_all
        self._inner_steps = Repeated(self._step_all) if is_graphed else self._step_all
        self._lr = LearningRate([worker.optimizer for worker in self.workers], device)
        self.num_steps = 0
        self._sent = [0] * setting.workers

    def step(self) -> None:
        self._lr.set(learning_rate(self.num_steps, self.setting.steps, self._peak))
        self._backward(self.places[self.num_steps])
        self._inner_steps()
        self.num_steps += 1
        for worker in self.workers:
            worker.loop.begin_due(self.num_steps, 1.0, self.num_steps)
        self._exchange()
        for worker in self.workers:
            worker.loop.end_due()
        if self.num_steps == self.setting.steps and self._ends_apart:
            for worker in self.workers:
                worker.loop.begin_all()
            self._exchange()
            for worker in self.workers:
                worker.loop.end_all()

    def evaluate(self, num_places: int) -> float:
        places = self.held_out.draw((num_places,), 0)
        with torch.no_grad():
            for mean, *own in zip(
                self.model.parameters(), *(worker.model.parameters() for worker in self.workers), strict=True
            ):
                mean.copy_(torch.stack(own).mean(0))
            losses = [loss_of(self.model, self.held_out, part) for part in places.split(64)]
        return float(torch.stack(losses).mean())

    @property
    def bytes_sent(self) -> int:
        """Bytes that the busiest worker has sent."""
        return max(self._sent)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "num_steps": self.num_steps,
            "sent": list(self._sent),
            "workers": [worker.state_dict() for worker in self.workers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps, self._sent = state["num_steps"], list(state["sent"])
        for worker, own in zip(self.workers, state["workers"], strict=True):
            worker.load_state_dict(own)

    def _exchange(self) -> None:
        if not self.workers[0].averaging.started:
            return
        sent = run_virtual_ranks(
            lambda group: self.workers[group.rank].averaging.run(group), len(self.workers)
        )
        self._sent = [total + own.bytes_sent for total, own in zip(self._sent, sent, strict=True)]

    def _backward_of(self, worker: Worker, places: Tensor) -> None:
        torch._foreach_zero_(worker.gradients)
        loss_of(worker.model, self.data, places).backward()

    def _backward_all(self, places: Tensor) -> None:
        for worker, own in zip(self.workers, places, strict=True):
            self._backward_of(worker, own)

    def _step_all(self) -> None:
        for worker in self.workers:
            worker.inner_step()

    def _graphed(self) -> Callable[[Tensor], None]:
        """Record `_backward_all` as a CUDA graph."""
        places = self.places[0].clone()
        pairs = zip(self.workers, places, strict=True)
        replay = record_branches([functools.partial(self._backward_of, *pair) for pair in pairs])

        def backward(new_places: Tensor) -> None:
            places.copy_(new_places)
            replay()

        return backward
