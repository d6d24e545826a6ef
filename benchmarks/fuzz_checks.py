"""One case of `fuzz.py`, on one of its ranks: train models with gradwire and without, and compare."""

import contextlib
import copy
import dataclasses
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from fuzz_models import NUM_WORDS, RESUME, WIDTH, Way, draw

# The largest error of a sum over steps, relative to the largest value of its parameter: of the sum of exact
# gradients, or of an average, which has what was held back before and may be larger.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.complex64: 1e-4, torch.bfloat16: 0.05}
ROUNDED = {"bf16": 0.02, "fp16": 0.004}


def batch(rank: int, step: int, turn: int) -> tuple[Tensor, Tensor, int]:
    """Return one input, different on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + turn)
    words = torch.randint(NUM_WORDS, (4,), generator=generator)
    return torch.randn(4, WIDTH, generator=generator), words, step + rank


def num_steps(way: Way, rank: int) -> int:
    """Return the number of steps of a rank; with uneven inputs, rank 0 has the most."""
    return way.num_steps + (way.world_size - rank if way.joins else 0)


def dense_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the present gradients by parameter, as dense fp64 values."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            found[name] = as_real(gradient.to_dense() if gradient.is_sparse else gradient).double()
    return found


def as_real(values: Tensor) -> Tensor:
    """Return complex values as pairs of numbers, and others as they are."""
    return torch.view_as_real(values) if values.is_complex() else values


def largest_of(values: Tensor) -> float:
    """Return the largest magnitude; 0 if there are no values."""
    return float(values.abs().max()) if values.numel() else 0.0


@dataclasses.dataclass
class Totals:
    """Gradients of a model over all steps, by parameter."""

    sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    peaks: dict[str, float] = dataclasses.field(default_factory=dict)
    """The largest magnitude of any step."""

    def add(self, model: nn.Module) -> None:
        """Add those of a step."""
        for name, values in dense_gradients(model).items():
            self.sums[name] = self.sums.get(name, 0) + values
            self.peaks[name] = max(self.peaks.get(name, 0.0), largest_of(values))


def train_alone(model: nn.Module, way: Way, rank: int) -> Totals:
    """Return this rank's own gradients over all steps."""
    totals = Totals()
    for step in range(num_steps(way, rank)):
        model.zero_grad()
        for turn in range(way.num_accumulated):
            model(*batch(rank, step, turn)).backward()
        totals.add(model)
    return totals


def train_together(
    ddps: list[DistributedDataParallel], wires: list[Any], way: Way, rank: int
) -> list[Totals]:
    """Train all models side by side; return their averages over all steps."""
    found = [Totals() for _ in ddps]
    models: list[Any] = [torch.compile(ddp, backend="eager") for ddp in ddps] if way.compiles else ddps
    with contextlib.ExitStack() as stack:
        if way.joins:
            for ddp in ddps:
                stack.enter_context(ddp.join())
        for step in range(num_steps(way, rank)):
            if way.change and step == way.changes_at:
                wires[:] = [change(ddp, wire, way) for ddp, wire in zip(ddps, wires, strict=True)]
            for model, ddp, totals in zip(models, ddps, found, strict=True):
                ddp.zero_grad()
                for turn in range(way.num_accumulated):
                    is_last = turn == way.num_accumulated - 1
                    with contextlib.nullcontext() if is_last else ddp.no_sync():
                        model(*batch(rank, step, turn)).backward()
                totals.add(ddp.module)
    return found


def change(ddp: DistributedDataParallel, wire: gradwire.Wire, way: Way) -> gradwire.Wire:
    """Change the recipe, or save the wire and go on with another; return the wire to go on with."""
    if way.change != RESUME:
        wire.swap(way.change)
        return wire
    state = wire.state_dict()
    wire.detach()
    resumed = gradwire.attach(ddp, way.recipe)
    resumed.load_state_dict(state)
    return resumed


def check_case(rank: int, seed: int, number: int) -> None:
    """Run one case, and raise AssertionError with what is wrong."""
    way, make = draw(seed, number, dist.get_world_size())
    nets = make()
    twins = copy.deepcopy(nets)
    ddps = [DistributedDataParallel(net, **way.options) for net in nets]
    wires = [gradwire.attach(ddp, way.recipe) for ddp in ddps]
    averages = train_together(ddps, wires, way, rank)
    for twin, net, wire, sent in zip(twins, nets, wires, averages, strict=True):
        state = wire.state_dict()
        problems = [check_averages(net, train_alone(twin, way, rank), sent, held_back(state), way)]
        if state["step"] != num_steps(way, 0):
            problems[0].append(f"{state['step']} steps counted, of {num_steps(way, 0)}")
        dist.broadcast_object_list(problems)  # with uneven inputs, rank 0 has seen all steps
        assert not problems[0], "; ".join(problems[0][:5])
        wire.detach()


def held_back(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return what this rank holds back, by parameter."""
    held: dict[str, Tensor] = {}
    for memory in state["memory"].values():
        for key, tensors in memory.items():
            if key.startswith("residual:"):
                for name, values in tensors.items():
                    held[name] = held.get(name, 0) + as_real(values).double()
    return held


def check_averages(net: nn.Module, own: Totals, sent: Totals, held: dict[str, Tensor], way: Way) -> list[str]:
    """Return what is wrong with the averages of a model, as this rank sees them; collective."""
    trained = {name: each for name, each in net.named_parameters() if each.requires_grad}
    zeros = {name: torch.zeros_like(as_real(each), dtype=torch.float64) for name, each in trained.items()}
    # What all ranks together would have sent without gradwire, less what they hold back.
    due = [
        own.sums.get(name, zero) - held.get(name, zero).reshape(zero.shape) for name, zero in zeros.items()
    ]
    used = torch.tensor([float(name in own.sums) for name in trained])
    largest = torch.tensor([largest_of(own.sums.get(name, zero)) for name, zero in zeros.items()])
    flat = torch.cat([each.flatten() for each in due])
    for tensor, op in ((flat, dist.ReduceOp.SUM), (used, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX)):
        dist.all_reduce(tensor, op=op)
    digests: list[list[str]] = [[] for _ in range(way.world_size)]
    dist.all_gather_object(digests, [digest(sent.sums.get(name, zero)) for name, zero in zeros.items()])
    problems = []
    means = flat.div(way.world_size).split([zero.numel() for zero in zeros.values()])
    columns = zip(
        trained.items(), means, used.tolist(), largest.tolist(), zip(*digests, strict=True), strict=True
    )
    for (name, parameter), mean, num_used, peak, hashes in columns:
        if not way.joins and len(set(hashes)) > 1:
            problems.append(f"{name}: ranks differ")
        if (name in sent.sums) != bool(num_used):
            has = "a" if name in sent.sums else "no"
            problems.append(f"{name}: {has} gradient, of {int(num_used)} ranks that used it")
        if mean.numel():
            error = largest_of(sent.sums.get(name, zeros[name]).flatten() - mean)
            limit = tolerance(parameter.dtype, way) * max(peak, sent.peaks.get(name, 0.0), 1e-6)
            if not error <= limit:
                shape = tuple(parameter.shape)
                problems.append(f"{name} {shape} {parameter.dtype}: off by {error:.3g} of {limit:.3g}")
    return problems


def digest(values: Tensor) -> str:
    """Return a hash of all bits."""
    return hashlib.blake2b(values.contiguous().numpy().tobytes()).hexdigest()


def tolerance(dtype: torch.dtype, way: Way) -> float:
    """Return the error that is allowed, relative to a parameter's largest value."""
    recipes = f"{way.recipe} {way.change}"
    own = TOLERANCES.get(dtype, 0.01)
    return max([own, *(each for name, each in ROUNDED.items() if name in recipes)]) * way.num_steps
