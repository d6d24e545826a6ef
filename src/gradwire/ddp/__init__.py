"""`attach` for ``DistributedDataParallel``: its hook slot, hooks of the user's, and the `Wire`.

Everything that knows DDP is here, in `ddp_comm_hooks` or in an adapter; how buckets are averaged is not.
"""

from gradwire.ddp.attach_to_all import AttachedModel, Attachments, attach_to_all
from gradwire.ddp.attaching import attach
from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_info import HookInfo, hook_name, register_hook_info
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
from gradwire.ddp.raw_hooks import hook_with_bridge, open_raw_engine, open_raw_lane
from gradwire.ddp.runner import Runner
from gradwire.ddp.stepping import SteppingRunner, step_parameters
from gradwire.ddp.user_hooks import HookRunner, check_result, require_future
from gradwire.ddp.wire import Wire, attachment_of

__all__ = [
    "AttachedModel",
    "Attachments",
    "Bridge",
    "HookInfo",
    "HookRunner",
    "Runner",
    "SteppingRunner",
    "Wire",
    "attach",
    "attach_to_all",
    "attachment_of",
    "check_result",
    "claim_of",
    "device_of",
    "hook_name",
    "hook_with_bridge",
    "in_buckets",
    "is_ddp",
    "num_transient",
    "open_raw_engine",
    "open_raw_lane",
    "register_hook_info",
    "require_future",
    "resolve_for_model",
    "step_parameters",
    "trained",
    "unwrap",
    "wrap",
]
