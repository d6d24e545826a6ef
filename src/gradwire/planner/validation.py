"""Compare predictions with measurements on the hosts of a lab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.headroom import NOOP, Benchmark, Record, Row, Workload, measure_steps
from gradwire.lab import Lab
from gradwire.planner.calibration import Calibration
from gradwire.planner.cost import Cluster
from gradwire.planner.forecasts import cores_per_worker, latency_s, link_bits_per_s
from gradwire.planner.predictions import predict, shapes_of


@dataclass(frozen=True)
class LabCase:
    """A lab to measure in."""

    num_hosts: int
    link: str
    delay: str | None = None

    @property
    def links(self) -> str:
        """The links in words."""
        return self.link if self.delay is None else f"{self.link}, {self.delay} long"

    def __str__(self) -> str:
        return f"{self.num_hosts} hosts with links of {self.links}"


# Cases with the link as the bottleneck, and cases without.
LAB_CASES = (
    LabCase(2, "100mbit"),
    LabCase(2, "1gbit"),
    LabCase(3, "500mbit"),
    LabCase(4, "200mbit"),
    LabCase(8, "200mbit"),
    LabCase(16, "200mbit"),
    LabCase(2, "200mbit", "20ms"),
)
# More hosts to a core say more about the core than about links.
MAX_HOSTS_PER_CORE = 2
# Small enough for many ranks on one machine.
_WORKLOAD = Workload(width=256, num_layers=4, batch=2, sequence=32)
_NUM_STEPS = 6
_BUCKET_MB = 4.0
# Latency between namespaces of one machine.
_LATENCY_S = 30e-6


@dataclass(frozen=True)
class Comparison:
    """A measured and a predicted step of one recipe in one case."""

    num_hosts: int
    link: str
    recipe: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement."""
        return self.predicted_ms / self.measured_ms - 1


def validate(
    recipes: Sequence[str],
    calibration: Calibration,
    on_case: Callable[[LabCase], None],
    cases: Sequence[LabCase] = LAB_CASES,
) -> list[Comparison]:
    """Measure every case, and predict it from its own step without communication.

    Calls ``on_case`` before each case. Raises ValueError if the calibration does not have a recipe,
    LabUnavailable if there can be no lab here, and RanksFailed if a rank fails.
    """
    for recipe in recipes:  # before minutes of measurements
        if recipe != NOOP:
            calibration.costs_of(recipe)
    comparisons = []
    for case in cases:
        on_case(case)
        record = measure_case(recipes, case)
        cluster = cluster_of(record)
        for row in record.rows:
            if row.recipe != NOOP:
                predicted_ms = predict_row(record, row, calibration, cluster)
                comparisons.append(
                    Comparison(case.num_hosts, case.links, row.recipe, row.step_ms, predicted_ms)
                )
    return comparisons


def measure_case(recipes: Sequence[str], case: LabCase) -> Record:
    """Train with each recipe on the hosts of a lab."""
    benchmark = Benchmark(recipes, _WORKLOAD, num_steps=_NUM_STEPS, bucket_mb=_BUCKET_MB)
    with Lab(case.num_hosts, case.link, case.delay) as lab:
        return measure_steps(benchmark, lab.num_hosts, lab=lab)


def cluster_of(record: Record) -> Cluster:
    """Return the lab of a measured case as a cluster; its hosts share this machine's cores."""
    latency = latency_s(record, _LATENCY_S)
    return Cluster(record.world_size, 1, link_bits_per_s(record), latency, cores_per_worker(record))


def predict_row(record: Record, row: Row, calibration: Calibration, cluster: Cluster) -> float:
    """Predict the step time in ms of a case's row, from the case's step without communication."""
    shapes, compute_s = shapes_of(_WORKLOAD.model()), record.noop.step_ms / 1e3
    return 1e3 * predict(row.recipe, shapes, compute_s, cluster, calibration, _BUCKET_MB).step_s
