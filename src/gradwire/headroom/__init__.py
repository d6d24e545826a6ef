"""Is communication the bottleneck? Step times of plain DDP, of the recipes and of no communication.

Example::

    from gradwire.headroom import Workload, give_verdict, measure_steps

    record = measure_steps(["bf16"], world_size=2, workload=Workload())
    print(give_verdict(record))
"""

from gradwire.headroom.measure import measure_here, measure_steps
from gradwire.headroom.records import Machine, Record, Row, read_records, write_records
from gradwire.headroom.scripts import ScriptFailed, measure_script
from gradwire.headroom.verdict import give_verdict
from gradwire.headroom.views import step_table
from gradwire.headroom.workloads import ModelFactory, Workload

__all__ = [
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
    "step_table",
    "write_records",
]
