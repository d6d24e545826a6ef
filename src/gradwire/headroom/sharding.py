"""Workloads that ``fully_shard`` shards: over all ranks (FSDP2), or within replicas (HSDP)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import gradwire
from gradwire.recipes import scattered
from gradwire.sharded import replica_mesh

KINDS = ("fsdp", "hsdp")


@dataclass(frozen=True)
class Sharding:
    """The kind of sharding, and the number of shards. Raises ValueError for a kind that there is not."""

    kind: str
    num_shards: int
    """The number of ranks that hold a model together: with ``fsdp`` all of them."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the sharding must be {' or '.join(KINDS)}, not {self.kind!r}")
        if self.num_shards < 1:
            raise ValueError(f"the number of shards must be at least 1, not {self.num_shards}")

    def check(self, recipe: gradwire.Recipe) -> None:
        """Raise ValueError if a recipe cannot be used with this sharding."""
        if self.kind == "fsdp":
            scattered(recipe)

    def num_replicas(self, world_size: int) -> int:
        """Return the number of replicas of ``world_size`` ranks; ValueError if shards do not divide them."""
        if self.kind == "fsdp" and world_size != self.num_shards:
            raise ValueError(
                f"fsdp shards over all ranks, {world_size} here, and not over {self.num_shards}: use hsdp"
            )
        if world_size % self.num_shards:
            raise ValueError(f"{world_size} ranks cannot be replicas of {self.num_shards} shards")
        return world_size // self.num_shards

    def sent_bytes(self, gradient_bytes: int, world_size: int) -> int:
        """Return the bytes that a rank has to send for exact gradients, in rings.

        With ``fsdp`` these are those of a reduce-scatter, with ``hsdp`` those between replicas.
        """
        if self.kind == "fsdp":
            return (world_size - 1) * gradient_bytes // world_size
        replicas = self.num_replicas(world_size)
        return 2 * (replicas - 1) * gradient_bytes // self.num_shards // replicas

    def mesh(self, group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
        """Return the mesh to shard over; collective. Ranks of one replica follow each other."""
        if self.kind == "fsdp":
            return DeviceMesh.from_group(group, device.type)
        return replica_mesh(self.num_replicas(dist.get_world_size()), device, dist.get_backend(group))
