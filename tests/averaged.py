"""Tensors that the tests of the averager average, and their exact means."""

import torch
import torch.distributed as dist

SHAPES = {"conv": (4, 3, 3, 3), "weight": (40, 33), "bias": (33,), "gain": (), "empty": (0, 5)}


def draw(rank, step=0, dtype=torch.float32, shapes=None):
    """Return one rank's tensors of one step, by name."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    shapes = SHAPES if shapes is None else shapes
    return {
        name: torch.randn(shape, generator=generator, dtype=wide).to(dtype) for name, shape in shapes.items()
    }


def clone(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def exact(step=0, dtype=torch.float32, weights=None, shapes=None, ranks=None):
    """Return the mean over ranks, in twice the precision."""
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    weights = [1.0] * len(ranks) if weights is None else weights
    wide = torch.complex128 if dtype.is_complex else torch.float64
    terms = [
        {name: w * t.to(wide) for name, t in draw(rank, step, dtype, shapes).items()}
        for rank, w in zip(ranks, weights, strict=True)
    ]
    return {name: sum(term[name] for term in terms) / sum(weights) for name in terms[0]}


def require_near(have, want, tolerance):
    for name, tensor in have.items():
        if tensor.numel():
            error = (tensor.to(want[name].dtype) - want[name]).abs().max()
            assert error <= tolerance, (name, float(error))


def require_identical(tensors):
    """Compare tensors over ranks, bit for bit."""
    mine = [bytes(t.contiguous().flatten().view(torch.uint8).tolist()) for t in tensors.values()]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert all(other == mine for other in everyone), "ranks differ"


def require_equal(have, want):
    for name in want:
        assert torch.equal(have[name], want[name]), name
