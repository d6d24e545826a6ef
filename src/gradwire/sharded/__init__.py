"""Models that ``fully_shard`` has sharded (FSDP2): reduce-scatter by recipe, averages over replicas (HSDP).

The `Wire` belongs to `ddp`, and the averaging itself to `averaging`.
"""

from gradwire.sharded.attach_to_all import attach_to_all
from gradwire.sharded.attaching import attach
from gradwire.sharded.blocks import replica_mesh, shard_blocks, shard_layout, unit_parameters
from gradwire.sharded.model import ShardedModel, group_of
from gradwire.sharded.shard_group import sharing, true_on_all
from gradwire.sharded.shards import (
    ShardLayouts,
    cut_like,
    local_values,
    shard_like,
    whole_tensor,
)
from gradwire.sharded.units import is_sharded
from gradwire.sharded.weights import row_bytes, weights_codec

__all__ = [
    "ShardLayouts",
    "ShardedModel",
    "attach",
    "attach_to_all",
    "cut_like",
    "group_of",
    "is_sharded",
    "local_values",
    "replica_mesh",
    "row_bytes",
    "shard_blocks",
    "shard_layout",
    "shard_like",
    "sharing",
    "true_on_all",
    "unit_parameters",
    "weights_codec",
    "whole_tensor",
]
