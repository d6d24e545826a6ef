"""Buckets: which parameter lies where in them, and state that is kept from step to step by parameter.

The exchange of buckets between ranks, and DDP's ways of making them, do not belong here.
"""

from gradwire.buckets.dtypes import dtype_name, dtype_named
from gradwire.buckets.layout import (
    BucketLayout,
    Layouts,
    Slot,
    as_real,
    canonical_name,
    row_by_row,
    shard_shape,
    trainable_parameters,
)
from gradwire.buckets.loss_scale import LossScale
from gradwire.buckets.memory import GRADIENT_STATES, Memory, is_gradient_state

__all__ = [
    "GRADIENT_STATES",
    "BucketLayout",
    "Layouts",
    "LossScale",
    "Memory",
    "Slot",
    "as_real",
    "canonical_name",
    "dtype_name",
    "dtype_named",
    "is_gradient_state",
    "row_by_row",
    "shard_shape",
    "trainable_parameters",
]
