"""Predictions beside measurements: hosts of a lab train what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.headroom import NOOP, Contest, Record, Row, Workload, measure_steps
from gradwire.lab import Lab
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import Cluster
from gradwire.planner.from_records import bits_per_s, cores_per_worker
from gradwire.planner.plans import predict, shapes_of

Case = tuple[int, str]

# Hosts and links: from two to eight, where the wire is the bottleneck and where it is not.
CASES: tuple[Case, ...] = ((2, "100mbit"), (2, "1gbit"), (3, "500mbit"), (4, "200mbit"), (8, "200mbit"))
# Small enough that eight ranks of it train on two cores.
_WORKLOAD = Workload(width=256, num_layers=4, batch=2, sequence=32)
_NUM_STEPS = 6
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
    recipes: Sequence[str],
    calibration: Calibration,
    on_case: Callable[[str], None],
    cases: Sequence[Case] = CASES,
) -> list[Comparison]:
    """Measure every case, and predict it from its own step without communication.

    Raises LabUnavailable where there can be no lab, and RanksFailed when a rank fails.
    """
    comparisons = []
    for num_hosts, link in cases:
        on_case(f"{num_hosts} hosts with links of {link}")
        record = measure_case(recipes, (num_hosts, link))
        cluster = cluster_of(record)
        for row in record.rows:
            if row.recipe != NOOP:
                predicted_ms = predict_row(record, row, calibration, cluster)
                comparisons.append(Comparison(num_hosts, link, row.recipe, row.step_ms, predicted_ms))
    return comparisons


def measure_case(recipes: Sequence[str], case: Case) -> Record:
    """Train with each recipe on the hosts of a lab."""
    contest = Contest(recipes, _WORKLOAD, num_steps=_NUM_STEPS, bucket_mb=_BUCKET_MB)
    with Lab(*case) as lab:
        return measure_steps(contest, lab.num_hosts, lab=lab)


def cluster_of(record: Record) -> Cluster:
    """The lab that a case was measured in, whose hosts share this machine's cores."""
    return Cluster(record.world_size, 1, bits_per_s(record), _LATENCY_S, cores_per_worker(record))


def predict_row(record: Record, row: Row, calibration: Calibration, cluster: Cluster) -> float:
    """The time in ms that a case's row would take there, predicted from what was measured without it."""
    shapes, compute_s = shapes_of(_WORKLOAD.model()), record.noop.step_ms / 1e3
    return 1e3 * predict(row.recipe, shapes, compute_s, cluster, calibration, _BUCKET_MB).step_s
