"""Train random sharded models in random ways by random recipes, and hold them to the laws of averaging.

    python benchmarks/fuzz_sharded.py --cases 1000 --jobs 4     1000 cases, on 4 groups of ranks at a time
    python benchmarks/fuzz_sharded.py --seed 1 --only 17        one of them again

A case is drawn from the seed and its number: FSDP2 or HSDP, 2 to 4 ranks, a recipe, an encoding of
parameters, mixed precision, accumulation, blocks that are nested, compiled, computed again, frozen or unused,
and a state that is loaded again, or on another grid. After each step:

- gradients and what ranks hold back are, summed over steps, the exact means, within the recipe's bound;
- a parameter has a gradient if and only if it has one without gradwire;
- replicas have the same gradients, and all ranks the same parameters, bit for bit;
- a resumed run has the bits of one that was not stopped.
"""

import random
import re
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from campaign import run_campaign
from fuzz_sharded_cases import NUM_WORDS, ShardedFuzz, draw
from fuzz_sharded_runs import Trained, follow, named, open_run, require_same, reshard, whole
from gradwire.averaging import checkpoint
from gradwire.sharded import local_values

CASE_S = 120.0
# The largest error of one rounding, relative to the largest gradient of any rank.
ERRORS = {
    "fp32": 1e-5,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
    "int8": 2.1 / 127,
    "fp8": 2.1 / 8,
    "int4": 2.1 / 7,
    "int4:rotated=true": 1.2,
    "sign:rotated=false": 2.0,
    "sign": 9.0,
    "int2": 4.0,
}


def loss(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + 10 * step + micro)
    words = torch.randint(NUM_WORDS, (4,), generator=generator)
    logits: Tensor = model(words, step)
    return logits.square().mean()


def train_step(run: Trained, case: ShardedFuzz, step: int, rank: int) -> None:
    """Compute the gradients of a step."""
    model = run.model
    for parameter in run.parameters.values():
        parameter.grad = None
    is_ddp = isinstance(model, DistributedDataParallel)
    for micro in range(case.num_micro):
        is_last = micro == case.num_micro - 1
        if is_ddp:
            model.require_backward_grad_sync = is_last
        elif case.accumulates == "last":
            model.set_requires_gradient_sync(is_last)
        elif case.accumulates == "replicas":
            model.set_requires_all_reduce(is_last)
        loss(model, step, micro, rank).backward()


def exact_means(run: Trained, case: ShardedFuzz, step: int, rank: int) -> tuple[dict[str, Tensor], float]:
    """Return the exact gradients of a step, and the largest of any rank; collective."""
    totals: dict[str, Tensor] = {}
    for micro in range(case.num_micro):
        run.twin.zero_grad()
        loss(run.twin, step, micro, rank).backward()
        for name, parameter in named(run.twin).items():
            if parameter.grad is not None:
                totals[name] = totals.get(name, 0) + parameter.grad.double()
    largest = torch.tensor(max(float(each.abs().max()) for each in totals.values()))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    is_ddp = isinstance(run.model, DistributedDataParallel)
    by = dist.get_world_size() if case.divisor is None or is_ddp else case.divisor
    for each in totals.values():
        dist.all_reduce(each)
        each.div_(by)
    return totals, float(largest) * dist.get_world_size() / by


def held_back(run: Trained) -> dict[str, Tensor]:
    """Return what all ranks together hold back of each whole parameter, in units of the mean."""
    fields = checkpoint.check_fields(run.wire.state_dict(gather=True))
    found: dict[str, Tensor] = {}
    for number in range(fields.grid.num_replicas):
        parts = [fields.memory[rank] for rank in fields.grid.replica(number)]
        for key in {key for part in parts for key in part if key.startswith("residual:")}:
            for name in parts[0].get(key, {}):
                rows = torch.cat([part[key][name] for part in parts])
                shape = named(run.twin)[name].shape
                kept = rows[: shape[0]].reshape(shape).double() / fields.grid.num_replicas
                found[name] = found.get(name, 0) + kept
    return found


def error_of(run: Trained) -> float:
    """Return the error that is allowed of one step, relative to the largest gradient of any rank.

    What a recipe with feedback leaves out is known, and counted.
    """
    leaves = gradwire.recipe(str(run.wire.recipe)).leaves()
    lossy = [each for each in leaves if not (run.has_feedback and keeps_residuals(each))]
    return max([1e-3, *(ERRORS[form_of(each)] for each in lossy)])


def form_of(recipe: gradwire.Recipe) -> str:
    """Return the key of ``ERRORS``: the recipe's name, with its option ``rotated`` if that is given."""
    return re.sub(r"[:,](?!rotated=)[^,]*", "", recipe.name).replace(",", ":")


def keeps_residuals(recipe: gradwire.Recipe) -> bool:
    return getattr(recipe.exchange, "feedback", None) not in (None, False)


class Sums:
    """Sums over steps of what was sent, and of what was due."""

    def __init__(self, case: ShardedFuzz) -> None:
        self._case = case
        self._missing: dict[str, Tensor] = {}
        self._allowed = 0.0
        self.deviation = 0.0

    def add(self, run: Trained, step: int, rank: int) -> dict[str, Tensor]:
        """Add a step, and check it; return its gradients."""
        case = self._case
        exact, largest = exact_means(run, case, step, rank)
        gradients = {name: p.grad for name, p in run.parameters.items() if p.grad is not None}
        have = {name: whole(each) for name, each in gradients.items()}
        assert have.keys() == exact.keys(), f"step {step}: gradients of {have.keys() ^ exact.keys()}"
        if run.replicas is not None:
            local = {name: local_values(each).clone() for name, each in gradients.items()}
            require_same(local, run.replicas, f"step {step}: gradients")
        for name, each in exact.items():
            assert have[name].isfinite().all(), f"step {step}: {name} is not finite"
            self._missing[name] = self._missing.get(name, 0) + each - have[name].double()
        is_narrow = torch.bfloat16 in (case.param_dtype, case.reduce_dtype) or case.several_dtypes
        # Roundings of computed gradients, sums and accumulation.
        self._allowed += largest * ((0.03 if is_narrow else 0.0) + error_of(run)) * case.num_micro
        held = held_back(run)
        for name, each in self._missing.items():
            error = float((each - held.get(name, 0)).abs().max())
            self.deviation = max(self.deviation, error / self._allowed)
            assert error <= self._allowed, f"step {step}: {name} is off by {error:.3g} of {self._allowed:.3g}"
        return have


def check(rank: int, case: ShardedFuzz) -> float:
    """Train in the way of ``case``, inside a rank; return the largest error, of that which is allowed."""
    sums, pauses = Sums(case), random.Random(rank)
    run = open_run(case, (case.num_replicas, case.num_shards), case.native, None)
    half = case.num_steps // 2
    results: list[dict[str, Tensor]] = []
    weights: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    for step in range(case.num_steps):
        if step == half and case.goes_on != "never":
            weights = {name: whole(p) for name, p in run.parameters.items()}
            state = run.wire.state_dict(gather=case.goes_on != "same")
            if case.goes_on != "same":
                run.wire.detach()
                run = open_run(case, case.later_grid, not case.native, weights)
                run.wire.load_state_dict(state)
        one_step(run, case, step, rank, pauses)
        results.append(sums.add(run, step, rank))
        descend(run)
    assert run.wire.stats().num_steps > 0
    run.wire.detach()
    if case.goes_on == "same":
        run = open_run(case, (case.num_replicas, case.num_shards), case.native, weights)
        run.wire.load_state_dict(state)
        for step in range(half, case.num_steps):
            one_step(run, case, step, rank, pauses)
            for name, parameter in run.parameters.items():
                if parameter.grad is not None:
                    is_same = torch.equal(whole(parameter.grad), results[step][name])
                    assert is_same, f"step {step}: {name} is not what a run without a stop has"
            descend(run)
        run.wire.detach()
    return sums.deviation


def one_step(run: Trained, case: ShardedFuzz, step: int, rank: int, pauses: random.Random) -> None:
    follow(run, case)
    if case.skewed:
        time.sleep(pauses.random() * 0.01)
    if case.evaluates and step % 2:
        with torch.no_grad():
            loss(run.model, step + 1, 0, rank)
        reshard(run.model)  # torch keeps what it need not free after a forward pass
    train_step(run, case, step, rank)


def descend(run: Trained) -> None:
    """Clip gradients, and take a step of SGD."""
    parameters = [p for p in run.parameters.values() if p.grad is not None]
    norm = whole(nn.utils.clip_grad_norm_(parameters, 1.0))
    assert norm.isfinite()
    torch.optim.SGD(parameters, lr=0.05).step()


if __name__ == "__main__":
    sys.exit(run_campaign(__doc__ or "", draw, check, CASE_S))
