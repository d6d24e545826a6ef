"""Averaging in loops of the user's own, without DDP: the `Averager` and what it packs tensors into.

The engine belongs to `averaging`; whatever knows DDP belongs to `ddp`.
"""

from gradwire.loops.averager import Averager
from gradwire.loops.choices import check_weight
from gradwire.loops.handle import AveragingHandle

__all__ = ["Averager", "AveragingHandle", "check_weight"]
