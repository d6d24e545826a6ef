"""Tiny sharded models that the tests train, and their exact gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

VOCABULARY, WIDTH, LENGTH = 50, 16, 6


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TinyTransformer(nn.Module):
    """An embedding, blocks with attention left out, and a head; 17 rows that no number of ranks divides."""

    def __init__(self, num_blocks=2, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.odd = nn.Linear(width, 17)
        self.head = nn.Linear(17, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.odd(x)))


def make(seed=0, **options):
    torch.manual_seed(seed)
    return TinyTransformer(**options)


def shard(model, mesh=None, **options):
    """Shard every block by itself, and the rest with the root."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mesh_of(*sizes, names=("replicate", "shard")):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])


def attached(spec, native, options=None, grid=(2, 2), **more):
    """Return a model with replicas of shards, sharded in one of two ways, and its wire."""
    mesh = mesh_of(*grid)
    if native:
        model = shard(make(), mesh, **(options or {}))
        return model, gradwire.attach(model, spec, **more)
    model = shard(make(), mesh["shard"], **(options or {}))
    return model, gradwire.attach(model, spec, replicas=mesh["replicate"], **more)


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (4, LENGTH), generator=generator)


def loss_of(model, tokens):
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def exact_gradients(model, step, num_ranks, num_micro=1):
    """Return the mean gradients over ranks of a plain copy of the model, by name."""
    model.zero_grad()
    for rank in range(num_ranks):
        for micro in range(num_micro):
            (loss_of(model, batch(rank, step + 100 * micro)) / num_ranks).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def full_gradients(model):
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def require_near(have, want, tolerance):
    """Compare, relative to the largest gradient of each parameter."""
    assert have.keys() == want.keys()
    for name, exact in want.items():
        error, largest = (have[name] - exact).abs().max(), exact.abs().max()
        assert error <= tolerance * largest + 1e-7, (name, float(error), float(largest))


def world():
    return dist.get_world_size()


def largest_local(plain, step, num_ranks):
    """Return the largest gradient of any rank, which bounds the steps of every block."""
    largest = 0.0
    for rank in range(num_ranks):
        plain.zero_grad()
        loss_of(plain, batch(rank, step)).backward()
        largest = max(largest, *(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None))
    return largest


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(model, steps, rank, lr=0.1, optimizer=None):
    """Train for some steps, and return all parameters."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def require_within(model, plain, step, tolerance):
    """Compare gradients with the exact mean; zeros would not pass."""
    want, have = exact_gradients(plain, step, world()), full_gradients(model)
    largest = largest_local(plain, step, world())
    assert have.keys() == want.keys()
    for name, exact in want.items():
        error = float((have[name].float() - exact).abs().max())
        assert error <= tolerance * largest + 1e-6, (name, error)
    whole, exact = (torch.cat([g.flatten() for g in each.values()]).float() for each in (have, want))
    assert torch.cosine_similarity(whole, exact, dim=0) > 0.5
