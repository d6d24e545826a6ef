"""Local SGD: ranks train alone for some steps, then average their parameters."""

from gradwire.local_sgd.loop import LocalSGD
from gradwire.local_sgd.outer import DiLoCo, Outer, SlowMo

__all__ = ["DiLoCo", "LocalSGD", "Outer", "SlowMo"]
