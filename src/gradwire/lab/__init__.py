"""Hosts on one machine: each in its own network namespace, behind a link of a given rate and delay.

What runs on the hosts does not belong here.

Example::

    from gradwire.lab import Lab
    from gradwire.testing import run_ranks

    with Lab(hosts=2, rate="1gbit") as lab:
        lab.run(["python", "train.py"])
        run_ranks(train, 2, lab=lab)
        print(lab.bytes_sent(0))
"""

from gradwire.lab.namespaces import enter_namespace
from gradwire.lab.network import Lab, LabUnavailable, find_tools
from gradwire.links import format_delay, format_rate, parse_delay, parse_rate

__all__ = [
    "Lab",
    "LabUnavailable",
    "enter_namespace",
    "find_tools",
    "format_delay",
    "format_rate",
    "parse_delay",
    "parse_rate",
]
