"""A model, and runs of it that are stopped and resumed."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

NUM_STEPS = 7


class Net(nn.Module):
    """A model of layers of several sizes, one of them with another memory order."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList([nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3)])
        self.sometimes = nn.Linear(40, 40)

    def forward(self, x, use_sometimes):
        x = self.conv(x).mean((2, 3))
        x = self.layers[1](self.layers[0](x).tanh()).tanh()
        return self.layers[2](self.sometimes(x) if use_sometimes else x)


def make(spec, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.002, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), gradwire.attach(model, spec)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        use_sometimes = not model.find_unused_parameters or step % 2 == 0
        model(torch.randn(5, 2, 6, 6), use_sometimes).square().mean().backward()
        optimizer.step()


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def snapshot(model, optimizer, wire):
    return through_a_file([model.module.state_dict(), optimizer.state_dict(), wire.state_dict()])


def resume(spec, saved, **options):
    model, optimizer, wire = make(spec, **options)
    weights, optimizer_state, state = saved
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(optimizer_state)
    wire.load_state_dict(state)
    return model, optimizer, wire


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run_whole(spec, **options):
    """Return a run that is not stopped, and what was saved before each of its steps."""
    model, optimizer, wire = make(spec, **options)
    saved = []
    with wire:
        for step in range(NUM_STEPS):
            saved.append(snapshot(model, optimizer, wire))
            train(model, optimizer, [step])
    return flat(model), saved


def random_spec(choice, *, feedback=None):
    """Draw a recipe with any options, alone, in a route or in a schedule; with feedback or not, if told."""
    reduction = choice.choice(["mean", "mean", "sum"])

    def plain():
        low_rank = {"rank": [1, 2, 3], "start": [0, 1, 4], "feedback": [True, False], "seed": [0, 5]}
        low_rank["factors"] = ["fp32", "int8", "int8+int4", "int4"]
        blocks = {"block": [64, 128, 512], "feedback": [True, False], "residual": ["fp32", "bf16"]}
        noise = {"rounding": ["nearest", "stochastic"], "seed": [0, 7]}
        table = {
            **{name: {**blocks, **noise} for name in ("int8", "fp8", "int4")},
            "sign": {**blocks, "block": [128, 512], "seed": [0, 7], "rotated": [True, False]},
            "powersgd": {**low_rank, "warm_start": [True, False], "whole": [True, False]},
            "acp": low_rank,
            **{name: {} for name in ("fp32", "fp16", "bf16")},
        }
        name = choice.choice([name for name in table if not feedback or table[name]])
        options = {option: choice.choice(values) for option, values in table[name].items()}
        if feedback and "feedback" in options:
            options["feedback"] = True
        options = {**options, "reduction": reduction}
        return f"{name}:{','.join(f'{option}={value}' for option, value in options.items())}"

    def scheduled():
        return f"schedule(0={plain()}; {choice.randint(1, 3)}={plain()}; {choice.randint(4, 6)}={plain()})"

    return choice.choice(
        [
            plain(),
            plain(),
            f"route(ndim<2={plain()}; numel>1000={plain()}; *={scheduled()})",
            scheduled(),
        ]
    )
