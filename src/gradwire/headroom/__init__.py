"""Measure whether communication is the bottleneck: step times with plain DDP, with recipes, without it.

Predictions for other hardware do not belong here.

Example::

    from gradwire.headroom import Benchmark, give_verdict, measure_steps

    record = measure_steps(Benchmark(["bf16", "int4"]), world_size=2)
    print(give_verdict(record))
"""

from gradwire.headroom.benchmark import Benchmark
from gradwire.headroom.decisions import describe_decisions, named_decisions
from gradwire.headroom.json_fields import (
    parse_json,
    printable,
    read_field,
    read_number,
    read_text,
    read_whole,
)
from gradwire.headroom.measure import measure_here, measure_steps, measure_under_torchrun
from gradwire.headroom.outer_loops import OuterPrediction, predict_outer_loop
from gradwire.headroom.record_json import read_records, write_records
from gradwire.headroom.records import ALLREDUCE, ALONE, NOOP, Machine, Proposal, Record, Row
from gradwire.headroom.script_launchers import ScriptFailed
from gradwire.headroom.scripts import measure_script
from gradwire.headroom.sharding import Sharding
from gradwire.headroom.tables import COLUMNS, record_notes, row_cells, step_table
from gradwire.headroom.verdict import describe_proposal, give_verdict, propose_outer_loop, recommend
from gradwire.headroom.workloads import ModelFactory, Workload, format_count

__all__ = [
    "ALLREDUCE",
    "ALONE",
    "COLUMNS",
    "NOOP",
    "Benchmark",
    "Machine",
    "ModelFactory",
    "OuterPrediction",
    "Proposal",
    "Record",
    "Row",
    "ScriptFailed",
    "Sharding",
    "Workload",
    "describe_decisions",
    "describe_proposal",
    "format_count",
    "give_verdict",
    "measure_here",
    "measure_script",
    "measure_steps",
    "measure_under_torchrun",
    "named_decisions",
    "parse_json",
    "predict_outer_loop",
    "printable",
    "propose_outer_loop",
    "read_field",
    "read_number",
    "read_records",
    "read_text",
    "read_whole",
    "recommend",
    "record_notes",
    "row_cells",
    "step_table",
    "write_records",
]
