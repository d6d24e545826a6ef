"""Private names of torch, all that gradwire uses.

A file for each part of torch. `PRIVATE_NAMES` lists the names, each with its purpose and its replacement if
torch drops it. The rest of gradwire calls the functions of this package, so another version of torch changes
it alone.
"""

from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.utils._pytree import tree_map_only

from gradwire.torch_private import fsdp
from gradwire.torch_private.autograd import (
    backward_pass,
    end_range_with,
    is_in_node,
    profiler_is_on,
    queue_callback,
)
from gradwire.torch_private.ddp import (
    FIRST_BUCKET_BYTES,
    AnyFuture,
    backward_step_handles,
    compute_bucket_assignment,
    ddp_facts,
    divides_by_active_ranks,
    in_backward_optimizers,
    is_joining,
    registered_hooks,
    replace_reducer,
    skip_lazy_init,
    uses_python_reducer,
)
from gradwire.torch_private.groups import (
    backend_of,
    default_store,
    device_types,
    gloo_group,
    has_tcp_store,
    own_connection,
    store_of,
    timeout_of_backend,
)
from gradwire.torch_private.names import PRIVATE_NAMES, missing_names
from gradwire.torch_private.tensors import (
    copy_all_,
    largest_magnitudes,
    loss_scale_of,
    num_writes,
    uncompiled,
)
from gradwire.torch_private.zero import (
    optimizer_class,
    zero_constructor,
    zero_device,
    zero_overlaps,
    zero_parameters,
    zero_share,
    zero_sync,
)

__all__ = [
    "FIRST_BUCKET_BYTES",
    "PRIVATE_NAMES",
    "AnyFuture",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "TCPStore",
    "backend_of",
    "backward_pass",
    "backward_step_handles",
    "compute_bucket_assignment",
    "copy_all_",
    "ddp_facts",
    "default_store",
    "device_types",
    "divides_by_active_ranks",
    "end_range_with",
    "fsdp",
    "gloo_group",
    "has_tcp_store",
    "in_backward_optimizers",
    "is_in_node",
    "is_joining",
    "largest_magnitudes",
    "loss_scale_of",
    "missing_names",
    "num_writes",
    "optimizer_class",
    "own_connection",
    "profiler_is_on",
    "queue_callback",
    "registered_hooks",
    "replace_reducer",
    "skip_lazy_init",
    "store_of",
    "timeout_of_backend",
    "tree_map_only",
    "uncompiled",
    "uses_python_reducer",
    "zero_constructor",
    "zero_device",
    "zero_overlaps",
    "zero_parameters",
    "zero_share",
    "zero_sync",
]
