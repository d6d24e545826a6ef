"""Checks of a machine, and of the network between the ranks of a group.

How findings are shown does not belong here, nor do measurements of training steps: those are `headroom`'s.
"""

from gradwire.doctor.findings import Finding
from gradwire.doctor.links import Link, compare_links, measure_links
from gradwire.doctor.machine import examine_machine
from gradwire.doctor.reach import examine_group

__all__ = [
    "Finding",
    "Link",
    "compare_links",
    "examine_group",
    "examine_machine",
    "measure_links",
]
