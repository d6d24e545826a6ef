"""`attach` for `DistributedDataParallel`: its hook slot, hooks of the user's, and the `Wire`.

Everything that knows DDP is here, in `ddp_comm_hooks` or in an adapter.
"""

from gradwire.ddp.attach_to_all import Attachment, Attachments, attach_to_all
from gradwire.ddp.attaching import attach
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_info import HookInfo, register_hook_info
from gradwire.ddp.models import (
    claim_of,
    device_of,
    in_buckets,
    is_ddp,
    num_transient,
    resolve_for_model,
    trained,
    unwrap,
    wrap,
)
from gradwire.ddp.stepping import SteppingRunner, step_parameters
from gradwire.ddp.user_hooks import HookRunner, check_result, hook_name, require_future
from gradwire.ddp.wire import Wire

__all__ = [
    "Attachment",
    "Attachments",
    "Bridge",
    "HookInfo",
    "HookRunner",
    "SteppingRunner",
    "Wire",
    "attach",
    "attach_to_all",
    "check_result",
    "claim_of",
    "device_of",
    "hook_name",
    "in_buckets",
    "is_ddp",
    "num_transient",
    "register_hook_info",
    "require_future",
    "resolve_for_model",
    "step_parameters",
    "trained",
    "unwrap",
    "wrap",
]
