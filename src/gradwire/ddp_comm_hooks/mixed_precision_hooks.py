"""torch's own hooks, since DDP imports them from torch; `gradwire.attach` combines them with any recipe."""

from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
    _AllreduceUpcastHookState,
    _reducer_allreduce_and_upcast_hook,
)

__all__ = ["_AllreduceUpcastHookState", "_reducer_allreduce_and_upcast_hook"]
