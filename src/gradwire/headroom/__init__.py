"""Is communication the bottleneck? Step times of plain DDP, of the recipes and of no communication.

Example::

    from gradwire.headroom import Contest, give_verdict, measure_steps

    record = measure_steps(Contest(["bf16", "int4"]), world_size=2)
    print(give_verdict(record))
"""

from gradwire.headroom.contest import Contest
from gradwire.headroom.measure import measure_here, measure_steps
from gradwire.headroom.records import Machine, Record, Row
from gradwire.headroom.saving import read_records, write_records
from gradwire.headroom.scripts import ScriptFailed, measure_script
from gradwire.headroom.verdict import give_verdict, recommend
from gradwire.headroom.views import step_table
from gradwire.headroom.workloads import ModelFactory, Workload

__all__ = [
    "Contest",
    "Machine",
    "ModelFactory",
    "Record",
    "Row",
    "ScriptFailed",
    "Workload",
    "give_verdict",
    "measure_here",
    "measure_script",
    "measure_steps",
    "read_records",
    "recommend",
    "step_table",
    "write_records",
]
