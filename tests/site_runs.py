"""Models of two sites, each sharded over two ranks, and the same models unsharded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.sharded_runs import same_bits

NUM_SHARDS = 2


def net():
    """Return a model with 5 rows to cut, and with one, which leaves ranks without any."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))


def sharded(native, grid=(2, NUM_SHARDS)):
    """Return a sharded model, and the argument ``sites`` for it; None if the model knows its replicas."""
    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("site", "shard"))
    model, over = net(), mesh if native else mesh["shard"]
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over), None if native else mesh["site"]


def make(native=False, grid=(2, NUM_SHARDS), lr=0.1, **options):
    model, sites = sharded(native, grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, optimizer, gradwire.LocalSGD(model, optimizer, sites=sites, **options)


def make_whole(groups, rank, **options):
    """Return the same on sites of one rank: each rank holds all that its site does."""
    model = DistributedDataParallel(net(), process_group=groups[rank % NUM_SHARDS])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gradwire.LocalSGD(model, optimizer, **options)


def whole(model):
    """Return all parameters of a site by name."""
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def assert_sites_same(model):
    """Compare the parameters of all sites, bit for bit."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, whole(model))
    assert all(same_bits(everyone[0], other) for other in everyone)


def drift(model, site, step):
    """Move parameters as an optimizer of this site would, by the same values whether sharded or not."""
    generator = torch.Generator().manual_seed(100 * step + site)
    with torch.no_grad():
        for p in model.parameters():
            moved = torch.randn(p.shape, generator=generator) * 0.01
            if hasattr(p, "to_local"):
                rows = -(-p.shape[0] // NUM_SHARDS)
                first = min(dist.get_rank() % NUM_SHARDS * rows, p.shape[0])
                p.to_local().add_(moved[first : first + rows])
            else:
                p.add_(moved)


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return model(torch.randn(4, 8, generator=generator)).square().mean()


def train(model, optimizer, local, rank, steps, **options):
    ended = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if local.step(**options):
            ended.append(step + 1)
    return ended


def check_bits(rank, recipe, outer, native):
    """Ranks move by the same values, sharded or not: the averages are the same bits."""
    site = rank // 2
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    options = {"period": 4, "recipe": recipe, "outer": outer}
    model, _, local = make(native, **options)
    reference, _, expected = make_whole(groups, rank, **options)
    with local, expected:
        num_ended = 0
        for step in range(9):
            drift(model, site, step)
            drift(reference, site, step)
            ended = local.step()
            assert ended == expected.step()
            assert same_bits(whole(model), whole(reference)), step
            num_ended += ended
        assert num_ended == local.num_averages == expected.num_averages > 1
        local.average()
        expected.average()
        assert same_bits(whole(model), whole(reference))
        assert_sites_same(model)
