"""Accelerators of Hugging Face Accelerate: those that gradwire can serve."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("gradwire")


def is_to_average(accelerator: Any) -> bool:
    """Return True if there is something to average; warn if this is the only process.

    Raises TypeError if the accelerator trains by an engine that averages by itself.
    """
    if accelerator.num_processes == 1:
        log.warning("this is the only process, so there is nothing to average: gradwire is not attached")
        return False
    if accelerator.distributed_type.startswith("MULTI_") or accelerator.is_fsdp2:
        return True
    raise TypeError(
        f"the accelerator trains by {accelerator.distributed_type.value}, which averages by itself, "
        "and gradwire cannot take its place: use DistributedDataParallel, which is the default, or FSDP2 "
        "(FullyShardedDataParallelPlugin(fsdp_version=2); in the Trainer fsdp=True)"
    )
