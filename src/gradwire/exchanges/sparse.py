"""Averaging of sparse gradients, such as those of ``Embedding(sparse=True)``."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.ops import Scale
from gradwire.peers import Group, gather, gather_rows


def average_sparse(gradient: Tensor, group: Group, scale: Scale) -> Tensor:
    """Return the sum over ranks of ``gradient * scale``, coalesced, the same bits on every rank.

    Every rank gathers all ranks' indices and values, uncompressed, and adds them in rank order. The host
    must know how many there are, so on CUDA this waits for the device.
    """
    gradient = gradient.coalesce()
    if group.size == 1:
        return (gradient * scale).coalesce()
    indices, values = gradient.indices(), gradient.values()
    device = gradient.device

    count = torch.full((), indices.shape[1], device=device)
    num_entries: list[int] = gather_rows(count, group).tolist()

    index_bytes = indices.shape[0] * indices.element_size()
    value_bytes = values.shape[1:].numel() * values.element_size()
    # A row holds indices, then values. Values start at a multiple of 16 bytes, as wide dtypes must.
    splits = [-(-n * index_bytes // 16) * 16 for n in num_entries]
    rows = [
        torch.empty(split + n * value_bytes, dtype=torch.uint8, device=device)
        for n, split in zip(num_entries, splits, strict=True)
    ]
    views = [
        (
            row[: n * index_bytes].view(indices.dtype).view(indices.shape[0], n),
            row[split:].view(values.dtype).view(n, *values.shape[1:]),
        )
        for n, split, row in zip(num_entries, splits, rows, strict=True)
    ]
    views[group.rank][0].copy_(indices)
    views[group.rank][1].copy_(values)
    gather(rows, group)

    wide = torch.promote_types(values.dtype, torch.float32)  # sums in at least fp32, as elsewhere
    total = torch.sparse_coo_tensor(
        torch.cat([i for i, _ in views], dim=1),
        torch.cat([v for _, v in views]).to(wide).mul_(scale),
        gradient.shape,
        check_invariants=False,  # every rank's tensor was valid; if nothing is said here, torch warns
    )
    return total.coalesce().to(values.dtype)
