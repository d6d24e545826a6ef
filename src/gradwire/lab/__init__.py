"""Hosts on one machine: each in a network namespace of its own, behind a link of a given rate.

Example::

    from gradwire.lab import Lab
    from gradwire.testing import run_ranks

    with Lab(hosts=2, rate="1gbit") as lab:
        lab.run(["python", "train.py"])
        run_ranks(train, 2, lab=lab)
        print(lab.bytes_sent(0))
"""

from gradwire.lab.namespaces import enter
from gradwire.lab.network import Lab, LabUnavailable
from gradwire.lab.rates import format_rate, parse_rate

__all__ = ["Lab", "LabUnavailable", "enter", "format_rate", "parse_rate"]
