"""Predictions beside measurements: hosts of a lab train what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.headroom.measure import measure_steps
from gradwire.headroom.records import NOOP
from gradwire.headroom.workloads import Workload
from gradwire.lab import Lab
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import Cluster
from gradwire.planner.plans import predict

# Hosts and links: from two to eight, where the wire is the bottleneck and where it is not.
_CASES = ((2, "100mbit"), (2, "1gbit"), (3, "500mbit"), (4, "200mbit"), (8, "200mbit"))
# Small enough that eight ranks of it train on two cores.
_WORKLOAD = Workload(width=256, num_layers=4, batch=2, sequence=32)
_NUM_STEPS = 8
_BUCKET_MB = 4.0
# Between namespaces of one machine.
_LATENCY_S = 30e-6


@dataclass(frozen=True)
class Comparison:
    """One recipe in one case."""

    num_hosts: int
    link: str
    recipe: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """How far off the prediction is, relative to what was measured."""
        return self.predicted_ms / self.measured_ms - 1


def validate(
    recipes: Sequence[str], calibration: Calibration, on_case: Callable[[str], None]
) -> list[Comparison]:
    """Measure every case, and predict it from its own step without communication.

    Raises LabUnavailable where there can be no lab, and RanksFailed when a rank fails.
    """
    comparisons = []
    for num_hosts, link in _CASES:
        on_case(f"{num_hosts} hosts with links of {link}")
        with Lab(num_hosts, link) as lab:
            bits_per_s = lab.bits_per_s
            record = measure_steps(
                recipes, num_hosts, _WORKLOAD, num_steps=_NUM_STEPS, bucket_mb=_BUCKET_MB, lab=lab
            )
        cores = record.machine.num_cores / num_hosts
        cluster = Cluster(num_hosts, 1, bits_per_s, _LATENCY_S, cores)
        compute_s = record.noop.step_ms / 1e3
        for row in record.rows:
            if row.recipe != NOOP:
                found = predict(
                    row.recipe, record.gradient_bytes // 4, compute_s, cluster, calibration, _BUCKET_MB
                )
                comparisons.append(Comparison(num_hosts, link, row.recipe, row.step_ms, 1e3 * found.step_s))
    return comparisons
