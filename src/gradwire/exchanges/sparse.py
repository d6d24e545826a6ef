"""Averaging of sparse gradients, such as those of ``Embedding(sparse=True)``."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.ops import Scale
from gradwire.transport import Group


def average_sparse(gradient: Tensor, group: Group, scale: Scale) -> Tensor:
    """The sum over ranks of ``gradient * scale``, as a coalesced sparse tensor, the same on every rank.

    Every rank gathers every rank's indices and values, uncompressed, and adds them in rank order. How
    many there are must be known on the host, so on CUDA this waits for the device.
    """
    gradient = gradient.coalesce()
    if group.size == 1:
        return (gradient * scale).coalesce()
    indices, values = gradient.indices(), gradient.values().contiguous()
    device = gradient.device

    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size)]
    counts[group.rank].fill_(indices.shape[1])
    _gather([count.view(torch.uint8) for count in counts], group)
    num_entries = [int(count) for count in counts]

    index_bytes = indices.shape[0] * indices.element_size()
    value_bytes = values.shape[1:].numel() * values.element_size()
    rows = [
        torch.empty(n * (index_bytes + value_bytes), dtype=torch.uint8, device=device) for n in num_entries
    ]
    own = rows[group.rank]
    split = num_entries[group.rank] * index_bytes
    own[:split].copy_(indices.contiguous().view(torch.uint8).flatten())
    own[split:].copy_(values.view(torch.uint8).flatten())
    _gather(rows, group)

    all_indices, all_values = [], []
    for n, row in zip(num_entries, rows, strict=True):
        split = n * index_bytes
        all_indices.append(row[:split].view(indices.dtype).view(indices.shape[0], n))
        all_values.append(row[split:].view(values.dtype).view(n, *values.shape[1:]))
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, dim=1),
        torch.cat(all_values).mul_(scale),
        gradient.shape,
        check_invariants=False,  # the indices are those of valid tensors; saying so avoids a warning
    )
    return total.coalesce()


def _gather(rows: list[Tensor], group: Group) -> None:
    messages = group.post(rows)
    for distance in range(1, group.size):
        messages.send((group.rank + distance) % group.size, rows[group.rank])
    messages.finish()
