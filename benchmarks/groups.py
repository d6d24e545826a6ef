"""The process group of a benchmark's ranks, and the GPUs that they may share."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from gradwire.ranks import runs_at_once, sharing_gpus


@contextlib.contextmanager
def rank_environment(num_ranks: int, device: str) -> Iterator[dict[str, str]]:
    """Yield the variables to set in every rank, so that those that share a GPU run at the same time."""
    if device == "cpu":
        yield {}
        return
    with sharing_gpus(num_ranks) as environment:
        if num_ranks > torch.cuda.device_count():
            ways = "at the same time" if runs_at_once(environment) else "in turns, for which messages wait"
            print(f"ranks share a GPU {ways}")
        yield environment


def open_group(rank: int, device: str) -> dist.ProcessGroup:
    """Return a group of all ranks for tensors on the device, whose current GPU is the rank's; collective.

    Ranks may share a GPU: NCCL takes two on one only if they seem to be on two hosts.
    """
    if device == "cuda":
        os.environ.setdefault("NCCL_HOSTID", str(rank))  # a lab sets both
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        torch.cuda.set_device(rank % torch.cuda.device_count())
        made: dist.ProcessGroup = dist.new_group(backend="nccl")
        return made
    assert dist.group.WORLD is not None
    return dist.group.WORLD
