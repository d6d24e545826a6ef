"""The process group of a benchmark's ranks."""

import os

import torch
import torch.distributed as dist


def open_group(rank: int, device: str) -> dist.ProcessGroup:
    """Return a group of all ranks for tensors on the device, whose current GPU is the rank's; collective.

    Ranks may share a GPU: NCCL takes two on one only if they seem to be on two hosts.
    """
    if device == "cuda":
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(rank % torch.cuda.device_count())
        made: dist.ProcessGroup = dist.new_group(backend="nccl")
        return made
    assert dist.group.WORLD is not None
    return dist.group.WORLD
