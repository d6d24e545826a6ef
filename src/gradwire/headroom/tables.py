"""Records as tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gradwire.headroom.records import ALLREDUCE, ALONE, NOOP, Record, Row

COLUMNS = ("recipe", "step ms", "p10-p90", "sent/step", "gain", "comm.", "error")


def step_table(record: Record) -> Group:
    """Return a table with a line per row, below the conditions and above the notes."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    # A route's name may be long, so it may wrap. Figures never do.
    table.add_column(COLUMNS[0], overflow="fold")
    for title in COLUMNS[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    for row in record.rows:
        cells = map(escape, row_cells(record, row))
        table.add_row(*cells, style="dim" if row.recipe in (NOOP, ALONE) else None)
    return Group(Text(_title(record)), table, Text("\n".join(record_notes(record)), style="dim"))


def row_cells(record: Record, row: Row) -> tuple[str, ...]:
    """Return the texts of a row, in the order of `COLUMNS`."""
    low, high = row.spread_ms
    return (
        record.label(row),
        _ms(row.step_ms),
        f"{_ms(low)}-{_ms(high)}",
        "unknown" if row.bytes_per_step is None else decimal(row.bytes_per_step),
        f"{record.gain(row):.2f}x",
        "-" if row.recipe in (NOOP, ALONE) else f"{record.communication_share(row):.0%}",
        "-" if row.recipe in (ALLREDUCE, NOOP, ALONE) else _percent(row.gradient_error),
    )


def _percent(part: float | None) -> str:
    """Return a share with two digits, or with fewer above 10 %."""
    return "-" if part is None else f"{part:.0%}" if part > 0.1 else f"{100 * part:.2g}%"


def _ms(time: float) -> str:
    return f"{time:.1f}" if time < 1000 else f"{time:.0f}"


def _title(record: Record) -> str:
    plural = "s" if record.world_size > 1 else ""
    link = f", {record.network}" if record.network else ""
    device = "" if record.device == "cpu" else f"{record.device}, "
    return (
        f"{record.world_size} rank{plural} over {record.backend}{link}: {record.workload}\n{device}"
        f"{record.machine}, torch {record.torch_version}"
    )


def record_notes(record: Record) -> list[str]:
    """Return the meaning of the columns, and the reservations about a record."""
    num_threads = record.world_size * record.threads_per_rank
    what = "forward and backward" if record.interleaved else "from one optimizer step to the next"
    notes = [
        f"Step: {what}, median of {len(record.allreduce.samples_ms)}, the slowest rank's time.",
        f"Gain: over allreduce ({record.plain}). Comm.: the share of a step that noop saves.",
        "Sent: bytes from one rank, counted; for allreduce computed (what a ring sends).",
    ]
    has_errors = any(row.gradient_error is not None for row in record.rows)
    relative = f"relative to {record.plain}'s" if has_errors else "not measured here"
    notes.append(f"Error: of the first step's averaged gradient, {relative}.")
    if any(row.decisions and row.gradient_error is not None for row in record.rows):
        notes.append("The error of auto is what its budget bounds, with the encodings of the last step.")
    if record.remainder is not None:
        notes.append(
            f"Sent are gradients alone: {record.remainder[0]} are the same in all rows. In noop, gradients "
            "stay where they are; in alone, each rank trains a whole model by itself."
        )
    if not record.interleaved:
        notes.append("Rows ran one after the other, so a slow minute may have hit only one of them.")
    if record.world_size > 1 and record.one_machine and not record.network:
        notes.append("All ranks are on this machine; between machines communication costs more.")
    if record.takes_turns:
        notes.append(
            "Ranks take turns on a GPU here, and messages wait for turns, so these figures say little of a "
            "network. With CUDA's Multi-Process Service ranks run at the same time. gradwire starts it if "
            "nvidia-cuda-mps-control is installed; under torchrun, start it yourself: "
            "nvidia-cuda-mps-control -d"
        )
    if num_threads > record.machine.num_cores:
        notes.append(
            f"{num_threads} threads share {record.machine.num_cores} cores, so ranks also wait for the CPU."
        )
    return notes
