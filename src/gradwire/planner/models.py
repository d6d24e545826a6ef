"""A user's model as DDP and `attach` would see it: its trained parameters, and the buckets that hold them."""

from __future__ import annotations

from torch import Tensor, nn

from gradwire.buckets import BucketLayout, Layouts, canonical_name
from gradwire.torch_private import FIRST_BUCKET_BYTES, compute_bucket_assignment

_DEFAULT_BUCKET_MB = 25.0


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are averaged, by name."""
    return {canonical_name(name): p for name, p in module.named_parameters() if p.requires_grad}


def bucket_layouts(module: nn.Module, bucket_mb: float | None = None) -> list[BucketLayout]:
    """Return DDP's buckets, in the order in which a backward pass that runs from the end produces them.

    They come from the function of torch that DDP itself calls. ``bucket_mb`` is DDP's ``bucket_cap_mb``.
    """
    cap = int((_DEFAULT_BUCKET_MB if bucket_mb is None else bucket_mb) * 2**20)
    limits = [FIRST_BUCKET_BYTES if bucket_mb is None else cap, cap]
    arrived = list[Tensor](reversed(trained_parameters(module).values()))
    found, _ = compute_bucket_assignment(arrived, limits)
    layouts = Layouts(module)
    buckets = ([arrived[i] for i in own] for own in found)
    # Complex gradients lie in buckets as pairs of real values.
    return [layouts.make(index, own[0].dtype.to_real(), own) for index, own in enumerate(buckets)]
