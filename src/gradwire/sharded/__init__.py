"""Models that ``fully_shard`` has sharded (FSDP2): reduce-scatter by recipe, averages over replicas (HSDP).

The `Wire` belongs to `ddp`, and the averaging itself to `averaging`.
"""

from gradwire.sharded.attach_to_all import attach_to_all
from gradwire.sharded.attaching import attach
from gradwire.sharded.units import is_sharded

__all__ = ["attach", "attach_to_all", "is_sharded"]
