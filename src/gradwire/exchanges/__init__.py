"""Protocols that average one bucket over a group of ranks, each a generator of rounds.

Encodings belong to `codecs`; threads and streams belong to `lanes`, and the order of buckets to `averaging`.
"""

from gradwire.exchanges.context import Context
from gradwire.exchanges.exchange import Exchange, average
from gradwire.exchanges.hierarchical import Hierarchical
from gradwire.exchanges.links import Links
from gradwire.exchanges.low_rank import LowRank
from gradwire.exchanges.mixed import Mixed
from gradwire.exchanges.noop import Noop
from gradwire.exchanges.one_shot import num_rounds
from gradwire.exchanges.rounds import Rounds, run_rounds
from gradwire.exchanges.route import Route
from gradwire.exchanges.scatter import aligned, aligned_rows, even_bounds
from gradwire.exchanges.scattered import Gathered, Scattered
from gradwire.exchanges.schedule import Schedule
from gradwire.exchanges.scratch import Scratch
from gradwire.exchanges.selector import Selector
from gradwire.exchanges.two_shot import PLAIN, TwoShot

__all__ = [
    "PLAIN",
    "Context",
    "Exchange",
    "Gathered",
    "Hierarchical",
    "Links",
    "LowRank",
    "Mixed",
    "Noop",
    "Rounds",
    "Route",
    "Scattered",
    "Schedule",
    "Scratch",
    "Selector",
    "TwoShot",
    "aligned",
    "aligned_rows",
    "average",
    "even_bounds",
    "num_rounds",
    "run_rounds",
]
