"""Fit the cost model's one constant: how much of a link's rate is lost where messages of several nodes meet.

python benchmarks/many_to_one.py      # root and iproute2; a minute or two

Measures plain fp32 averaging, in which each rank sends to all others at once. Finds the constant that brings
the model closest to all measurements. The cases are not among those of `gradwire plan --validate`.
"""

import dataclasses
import math
import os

from gradwire.headroom import Record, Row
from gradwire.planner import LAB_CASES, Calibration, LabCase, calibrate
from gradwire.planner.validation import cluster_of, measure_case, predict_row

FITTED_ON = (LabCase(3, "300mbit"), LabCase(4, "400mbit"), LabCase(6, "200mbit"))
CANDIDATES = [round(0.01 * i, 2) for i in range(51)]


def off(record: Record, row: Row, speeds: Calibration, constant: float) -> float:
    """Return the error of the model with this constant, as a logarithm."""
    cluster = dataclasses.replace(cluster_of(record), many_to_one=constant)
    return math.log(predict_row(record, row, speeds, cluster) / row.step_ms)


def main() -> None:
    assert not set(FITTED_ON) & set(LAB_CASES)
    # torch would warn in every rank that hosts of a lab have no names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    speeds = calibrate(["fp32"])
    found: list[tuple[Record, Row]] = []
    for case in FITTED_ON:
        record = measure_case(["fp32"], case)
        (row,) = record.recipes
        found.append((record, row))
        alone = min(CANDIDATES, key=lambda constant: abs(off(record, row, speeds, constant)))
        share = case.num_hosts**-alone
        print(f"{case}: {row.step_ms:.1f} ms, right with {alone:.2f}, which leaves {share:.2f} of the rate")
    best = min(CANDIDATES, key=lambda constant: sum(off(*each, speeds, constant) ** 2 for each in found))
    print(f"closest to all: {best:.2f}")
    for record, row in found:
        print(f"{record.world_size} hosts, {record.link}: {math.expm1(off(record, row, speeds, best)):+.0%}")


if __name__ == "__main__":
    main()
