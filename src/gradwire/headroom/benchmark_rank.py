"""The inside of a rank: models that take turns, so that a slow minute of the machine hits all alike."""

from __future__ import annotations

import math
import random
import time

import torch
import torch.distributed as dist

import gradwire
from gradwire.headroom.benchmark import Benchmark, OnProgress, RankResult, Variant
from gradwire.headroom.devices import largest_of_ranks, longest_trip_s
from gradwire.headroom.proposals import propose_encodings
from gradwire.headroom.records import Proposal, ring_bytes
from gradwire.headroom.timed_models import (
    TimedModel,
    TimedModelFactory,
    gradient_bytes,
    num_layers,
    relative_error,
)
from gradwire.headroom.verdict import best_of, keeps_gradients
from gradwire.ranks import time_limit

# The first backward has DDP's provisional buckets, the second its final ones. The steps after the first
# are timed, to see how many steps there is time for.
_NUM_WARM_UP_STEPS = 3
# Turns of the recipes that could be recommended, to choose the one to try with smaller buckets.
_NUM_QUALIFYING_TURNS = 2
# Models change turns after so few steps that a slow minute of the machine is slow for all of them. The number
# is even: see `slowest_ms`.
_STEPS_PER_TURN = 2
# After a pause, as between two turns, TCP begins slowly again, and needs several round trips until it sends
# as fast as before. If they take so long, a turn begins with steps that do not count: training has no pauses.
_FAR_S = 0.01
_NUM_UNTIMED_FAR_STEPS, _FAR_STEPS_PER_TURN = 8, 4
# Fewer pairs of steps cannot rule chance out: see the verdict.
_MIN_STEPS, _MAX_STEPS = 8, 24
# No turn takes this long with a model that fits such a run. Ranks that take longer are stuck.
TURN_LIMIT_S = 600.0


def run_benchmark(benchmark: Benchmark, on_progress: OnProgress) -> RankResult:
    """Time the benchmark's variants, taking turns; call it on every rank of the default group at once."""
    return _BenchmarkRun(benchmark, on_progress).run()


class _BenchmarkRun:
    """One rank's run of a benchmark: the models, and the number of steps that are done."""

    def __init__(self, benchmark: Benchmark, on_progress: OnProgress) -> None:
        self._benchmark = benchmark
        self._on_progress = on_progress
        self._begin = time.monotonic()
        with time_limit(TURN_LIMIT_S):
            self._factory = TimedModelFactory(benchmark)
            self._models = [
                self._factory.make(Variant(recipe, benchmark.bucket_mb)) for recipe in benchmark.compared
            ]
            if benchmark.sharding is not None:
                self._models.append(self._factory.make(Variant(None, None, is_alone=True)))
        is_far = longest_trip_s() > _FAR_S
        self._num_untimed = _NUM_UNTIMED_FAR_STEPS if is_far else 0
        self._steps_per_turn = _FAR_STEPS_PER_TURN if is_far else _STEPS_PER_TURN
        self._num_done = 0
        self._num_in_all = self._num_to_come(benchmark.num_steps or _MAX_STEPS)
        self._num_in_all += len(self._models) * _NUM_WARM_UP_STEPS

    @property
    def _plain(self) -> TimedModel:
        """The model of plain DDP."""
        return self._models[0]

    def run(self) -> RankResult:
        """Warm up, choose the variants and the number of steps, and time them."""
        for model in self._models:
            self._take_turn(model, 1)
            # Plain DDP had the first turn, and still has its gradients.
            if not model.variant.is_alone:
                model.gradient_error = relative_error(model.model, self._plain.model)
        for model in self._models:
            self._warm_up(model)
        self._add_small_buckets()
        self._time_steps(self._choose_num_steps())
        with time_limit(TURN_LIMIT_S):
            dist.barrier()
            return self._finish()

    def _num_to_come(self, num_steps: int) -> int:
        """Return the number of steps that all models take for ``num_steps`` timed ones of each."""
        num_turns = math.ceil(num_steps / self._steps_per_turn)
        return len(self._models) * (num_steps + num_turns * self._num_untimed)

    def _take_turn(
        self, model: TimedModel, num_steps: int, seed: int = 0, *, num_untimed: int = 0
    ) -> list[float]:
        """Run steps of one model on all ranks at once, and return the times of the last, in seconds."""
        # All models see the same dropout, so that they do the same work and their gradients compare.
        torch.manual_seed(seed * dist.get_world_size() + dist.get_rank())
        with time_limit(TURN_LIMIT_S):
            dist.barrier()
            times_s = [model.step() for _ in range(num_untimed + num_steps)][num_untimed:]
        self._num_done += num_untimed + num_steps
        self._on_progress(self._num_done, max(self._num_in_all, self._num_done))
        return times_s

    def _warm_up(self, model: TimedModel) -> None:
        """Take the warm-up steps after the first."""
        model.warm_up_s += largest_of_ranks(self._take_turn(model, _NUM_WARM_UP_STEPS - 1))

    def _add_small_buckets(self) -> None:
        """Add models with smaller buckets: of plain DDP, and of the best recipe so far."""
        small_mb = self._benchmark.small_bucket_mb
        has_several_buckets = small_mb is not None and gradient_bytes(self._plain.model) > small_mb * 2**20
        if dist.get_world_size() == 1 or not has_several_buckets:
            return
        model_of = {model.variant.recipe: model for model in self._models}
        for recipe in dict.fromkeys((None, self._best_recipe_so_far())):
            variant = Variant(recipe, small_mb)
            if variant == model_of[recipe].variant:
                continue
            model = self._factory.make(variant)
            self._models.append(model)
            self._take_turn(model, 1)
            # The gradients are the same, except for the places where blocks begin.
            model.gradient_error = model_of[recipe].gradient_error
            self._warm_up(model)

    def _best_recipe_so_far(self) -> gradwire.Recipe | None:
        """Return the recipe that the verdict would name by now; None if it would name none.

        The recipes that it could name take more turns first.
        """
        plain_bytes = ring_bytes(gradient_bytes(self._plain.model), dist.get_world_size())
        recipes = self._models[1:-1]  # between plain DDP and no communication
        able = [model for model in recipes if keeps_gradients(model.row_so_far(), plain_bytes)]
        for turn in range(_NUM_QUALIFYING_TURNS if len(able) > 1 else 0):
            for model in random.Random(turn).sample(able, k=len(able)):
                model.warm_up_s += largest_of_ranks(self._take_turn(model, _STEPS_PER_TURN))
        recipe_of = {model.row_so_far(): model.variant.recipe for model in able}
        best = best_of(recipe_of, plain_bytes)
        return None if best is None else recipe_of[best]

    def _choose_num_steps(self) -> int:
        """Return the number of steps asked for, or as many as there is time left for."""
        if self._benchmark.num_steps is not None:
            return self._benchmark.num_steps
        (spent_s,) = largest_of_ranks([time.monotonic() - self._begin])
        num_affordable = (self._benchmark.seconds - spent_s) / sum(min(m.warm_up_s) for m in self._models)
        num_affordable *= self._steps_per_turn / (self._steps_per_turn + self._num_untimed)
        return int(max(_MIN_STEPS, min(_MAX_STEPS, num_affordable)))

    def _time_steps(self, num_steps: int) -> None:
        """Time the steps of all models, in turns."""
        self._num_in_all = self._num_done + self._num_to_come(num_steps)
        for turn, start in enumerate(range(0, num_steps, self._steps_per_turn), start=1):
            num_timed = min(self._steps_per_turn, num_steps - start)
            # All ranks use the same order. It changes each time, so no model always follows the same one.
            for model in random.Random(turn).sample(self._models, k=len(self._models)):
                model.times_s += self._take_turn(model, num_timed, turn, num_untimed=self._num_untimed)

    def _finish(self) -> RankResult:
        device = self._factory.device
        parameters, proposal = self._plain.model.parameters(), self._propose()
        return RankResult(
            measurements=tuple(model.finish() for model in self._models),
            num_threads=torch.get_num_threads(),
            backend=dist.get_backend(self._factory.group),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            num_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            gradient_bytes=gradient_bytes(self._plain.model),
            num_layers=num_layers(self._plain.model),
            proposal=proposal,
        )

    def _propose(self) -> Proposal | None:
        """Return what ``auto`` would send, from gradients that are not averaged: those of noop."""
        budget = self._benchmark.budget
        (idle,) = (model for model in self._models if model.variant.recipe == gradwire.noop())
        if budget is None or dist.get_world_size() == 1 or idle.wire is None:
            return None
        return propose_encodings(idle.wire, self._factory.group, budget)
