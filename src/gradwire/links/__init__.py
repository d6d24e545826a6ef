"""Rates and delays of links between machines, as people write them: ``100mbit``, ``20ms``.

Whatever measures links, or makes them, does not belong here.
"""

from gradwire.links.delays import format_delay, parse_delay
from gradwire.links.rates import format_rate, parse_rate

__all__ = ["format_delay", "format_rate", "parse_delay", "parse_rate"]
