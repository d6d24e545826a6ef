"""Is communication the bottleneck? Step times of plain DDP, of the recipes and of no communication.

Example::

    from gradwire.headroom import Contest, give_verdict, measure_steps

    record = measure_steps(Contest(["bf16", "int4"]), world_size=2)
    print(give_verdict(record))
"""

from gradwire.headroom.contenders import local_gpu
from gradwire.headroom.contest import Contest
from gradwire.headroom.measure import measure_here, measure_steps
from gradwire.headroom.records import ALLREDUCE, NOOP, Machine, Record, Row
from gradwire.headroom.saving import read_records, take, write_records
from gradwire.headroom.scripts import ScriptFailed, measure_script
from gradwire.headroom.verdict import give_verdict, recommend
from gradwire.headroom.views import COLUMNS, cells_of, notes_on, step_table
from gradwire.headroom.workloads import ModelFactory, Workload, count_of

__all__ = [
    "ALLREDUCE",
    "COLUMNS",
    "NOOP",
    "Contest",
    "Machine",
    "ModelFactory",
    "Record",
    "Row",
    "ScriptFailed",
    "Workload",
    "cells_of",
    "count_of",
    "give_verdict",
    "local_gpu",
    "measure_here",
    "measure_script",
    "measure_steps",
    "notes_on",
    "read_records",
    "recommend",
    "step_table",
    "take",
    "write_records",
]
