"""Averaging without compression, for exchanges that compress and for comparison with them."""

from __future__ import annotations

from gradwire.codecs import Raw
from gradwire.exchanges.two_shot import TwoShot

PLAIN = TwoShot(Raw())
