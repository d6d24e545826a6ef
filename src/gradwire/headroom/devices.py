"""The device and the process group of a rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from gradwire.peers import limited_store, round_trip_s, timeout_of
from gradwire.processes import under_torchrun
from gradwire.ranks import runs_at_once


def local_gpu(rank: int, world_size: int) -> torch.device:
    """Return the GPU of a rank, which other ranks may share. Call it before any NCCL group is made."""
    index, num_local = rank, _num_local(world_size)
    if under_torchrun():
        index = int(os.environ["LOCAL_RANK"])
    if num_local > torch.cuda.device_count():
        # NCCL accepts two ranks on one device only if they claim to be on different hosts.
        os.environ.setdefault("NCCL_HOSTID", str(rank))
        if num_local == world_size:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return torch.device("cuda", index % torch.cuda.device_count())


def takes_turns(device: str, world_size: int, environment: dict[str, str] | None = None) -> bool:
    """Return True if ranks of this machine take turns on a GPU, so that messages wait for turns.

    ``environment`` is what their environment has beyond ours. One process asks: the service answers one.
    """
    is_shared = device == "cuda" and _num_local(world_size) > torch.cuda.device_count()
    return is_shared and not runs_at_once(environment)


def _num_local(world_size: int) -> int:
    """Return the number of ranks on this machine, which under torchrun may be one of several."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else world_size


def open_group(device: str) -> tuple[dist.ProcessGroup, torch.device]:
    """Return the group to average over, the default one or a new NCCL one, and this rank's device."""
    default = dist.group.WORLD
    assert default is not None
    if device == "cpu":
        return default, torch.device("cpu")
    gpu = local_gpu(dist.get_rank(), dist.get_world_size())
    torch.cuda.set_device(gpu)
    return default if dist.get_backend() == "nccl" else dist.new_group(backend="nccl"), gpu


def join_torchrun(device: str) -> None:
    """Make the default group of the ranks that torchrun started."""
    if device == "cpu":
        dist.init_process_group("gloo")
        return
    gpu = local_gpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", device_id=gpu)


def longest_trip_s() -> float:
    """Return the longest time of a round trip from any rank to the store, in seconds."""
    world = dist.group.WORLD
    assert world is not None
    (longest,) = largest_of_ranks([round_trip_s(limited_store(world, timeout_of(world)))])
    return longest


def largest_of_ranks(figures: list[float]) -> list[float]:
    """Return the largest value of each figure over all ranks.

    A step ends with the slowest rank. And all ranks draw the same conclusions from the same figures.
    """
    return _reduce(figures, dist.ReduceOp.MAX)


def sum_of_ranks(figures: list[float]) -> list[float]:
    """Return the sum of each figure over all ranks."""
    return _reduce(figures, dist.ReduceOp.SUM)


def _reduce(figures: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    reduced = torch.tensor(figures, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op)
    return reduced.tolist()
