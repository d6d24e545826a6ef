"""A bucket: which parameter lies where in it, and what is kept from step to step by parameter.

How buckets are exchanged, and where they come from, is known elsewhere.
"""

from gradwire.buckets.layout import BucketLayout, Layouts, Slot, as_real, canonical_name
from gradwire.buckets.loss_scale import LossScale
from gradwire.buckets.memory import Memory

__all__ = [
    "BucketLayout",
    "Layouts",
    "LossScale",
    "Memory",
    "Slot",
    "as_real",
    "canonical_name",
]
