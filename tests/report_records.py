"""Records for tests of the report page."""

import dataclasses

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
