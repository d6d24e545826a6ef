"""Buckets with given values, for tests of low rank."""

import torch
from torch import nn

from gradwire.buckets.layout import BucketLayout, Slot


class Given(nn.Module):
    """Parameters whose gradients are what `forward` is called with."""

    def __init__(self, *shapes, dtype=torch.float32):
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, given):
        return sum((p * g).sum() for p, g in zip(self.values, given, strict=True))


def draw(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]


def outer(seed, n, m):
    (u, v) = draw(seed, n, m)
    return torch.outer(u, v)


def layout_of(*shapes, stride=None, dtype=torch.float32):
    strides = [stride or torch.empty(shape, device="meta").stride() for shape in shapes]
    own = zip(shapes, strides, strict=True)
    slots = [Slot(f"p{i}", 0, torch.Size(shape), stride) for i, (shape, stride) in enumerate(own)]
    return BucketLayout.packed(0, dtype, slots)
