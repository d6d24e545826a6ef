"""Records for tests of the report page."""

import dataclasses

from gradwire.tuning import DecisionSummary
from tests.records import record

EVIL = '</script><script>alert("1")</script><img src=x onerror=alert(2)>'


def measured(**more):
    found = record(allreduce=100, fp32=99, bf16=80, noop=50)
    rows = tuple(
        dataclasses.replace(row, gradient_error=1e-3, wait_ms=20.0, work_ms=10.0, num_messages=8)
        if row.recipe == "bf16"
        else row
        for row in found.rows
    )
    return dataclasses.replace(found, rows=rows, **more)


def tuned(num_models=1, reason="29% of a step is communication", **more):
    """Return a record with a row of ``auto``, which has decided twice for each model."""
    found = record(allreduce=100, auto=60, noop=50)
    first = DecisionSummary(10, 26.2, 7.6, 20.0, 20.9, 0.28, 300_556, (("int2", 6), ("int3", 42)), reason)
    last = DecisionSummary(57, 20.3, 3.9, 20.1, None, 0.26, 308_304, (("int3", 44), ("int8", 4)), "faster")
    auto = dataclasses.replace(found.rows[1], gradient_error=0.26, decisions=((first, last),) * num_models)
    return dataclasses.replace(found, rows=(found.rows[0], auto, found.rows[2]), **more)
