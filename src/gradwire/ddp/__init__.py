"""`attach` for ``DistributedDataParallel``: the hook slot, users' hooks, and the `Wire`.

The averaging itself belongs to `averaging`; no other package but `ddp_comm_hooks` and adapters knows DDP.
"""

from gradwire.ddp.attach_to_all import AfterAttach, AttachedModel, Attachments, attach_to_all
from gradwire.ddp.attaching import attach
from gradwire.ddp.attachment import Attachment
from gradwire.ddp.bridge import Bridge, queue_after_ddp
from gradwire.ddp.bucket_assignment import DDPBuckets
from gradwire.ddp.bucket_order import BucketOrder, BucketPosition
from gradwire.ddp.choice import Choice
from gradwire.ddp.ddp_bucket import DDPBucket
from gradwire.ddp.gradients import local_part
from gradwire.ddp.hook_info import Hook, HookInfo, hook_name, register_hook_info
from gradwire.ddp.hook_slot import HookTaken
from gradwire.ddp.models import (
    bucketed_parameters,
    claim_of,
    device_of,
    is_ddp,
    make_ddp,
    num_bucketed,
    num_transient,
    resolve_for_model,
    shared_parameters,
    trained_parameters,
    unwrap,
)
from gradwire.ddp.nonfinite import OnNonfinite
from gradwire.ddp.options import Options
from gradwire.ddp.raw_hooks import hook_with_bridge, open_raw_engine, open_raw_lane
from gradwire.ddp.replacing import replaced
from gradwire.ddp.runner import Runner
from gradwire.ddp.step_checks import StepChecks
from gradwire.ddp.stepping import SteppingRunner, step_parameters
from gradwire.ddp.untold_scaler import watch_for_scaler
from gradwire.ddp.user_hooks import HookRunner, check_result, require_future
from gradwire.ddp.verification import hash_of_parameters
from gradwire.ddp.wire import Wire, attachment_of, ddp_attachment_of
from gradwire.ddp.wrapping import wrap

__all__ = [
    "AfterAttach",
    "AttachedModel",
    "Attachment",
    "Attachments",
    "Bridge",
    "BucketOrder",
    "BucketPosition",
    "Choice",
    "DDPBucket",
    "DDPBuckets",
    "Hook",
    "HookInfo",
    "HookRunner",
    "HookTaken",
    "OnNonfinite",
    "Options",
    "Runner",
    "StepChecks",
    "SteppingRunner",
    "Wire",
    "attach",
    "attach_to_all",
    "attachment_of",
    "bucketed_parameters",
    "check_result",
    "claim_of",
    "ddp_attachment_of",
    "device_of",
    "hash_of_parameters",
    "hook_name",
    "hook_with_bridge",
    "is_ddp",
    "local_part",
    "make_ddp",
    "num_bucketed",
    "num_transient",
    "open_raw_engine",
    "open_raw_lane",
    "queue_after_ddp",
    "register_hook_info",
    "replaced",
    "require_future",
    "resolve_for_model",
    "shared_parameters",
    "step_parameters",
    "trained_parameters",
    "unwrap",
    "watch_for_scaler",
    "wrap",
]
