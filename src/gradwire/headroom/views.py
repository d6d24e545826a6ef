"""Records for the terminal."""

from __future__ import annotations

from rich import box
from rich.filesize import decimal
from rich.table import Table

from gradwire.headroom.records import NOOP, Record, Row


def step_table(record: Record) -> Table:
    """A row per recipe: step time, spread, bytes, gain over plain DDP, share of communication."""
    table = Table(title=_title(record), caption=_caption(record), box=box.SIMPLE, title_justify="left")
    table.caption_justify = "left"
    table.add_column("recipe")
    table.add_column("step ms", justify="right")
    table.add_column("p10-p90", justify="right")
    table.add_column("sent per step", justify="right")
    table.add_column("gain", justify="right")
    table.add_column("communication", justify="right")
    for row in record.rows:
        table.add_row(*_cells(record, row), style="dim" if row.recipe == NOOP else None)
    return table


def _cells(record: Record, row: Row) -> tuple[str, ...]:
    low, high = row.spread_ms
    return (
        row.recipe,
        f"{row.step_ms:.1f}",
        f"{low:.1f}-{high:.1f}",
        "unknown" if row.bytes_per_step is None else decimal(row.bytes_per_step),
        f"{record.gain(row):.2f}x",
        "-" if row.recipe == NOOP else f"{record.communication_share(row):.0%}",
    )


def _title(record: Record) -> str:
    plural = "s" if record.world_size > 1 else ""
    return (
        f"{record.world_size} rank{plural} over {record.backend}: {record.workload}\n"
        f"{record.machine}, torch {record.torch_version}"
    )


def _caption(record: Record) -> str:
    num_threads = record.world_size * record.threads_per_rank
    notes = [
        f"Step: forward and backward, median of {len(record.allreduce.samples_ms)}, the slowest rank's time.",
        "Gain: over allreduce (plain DDP). Communication: what noop does without.",
        "Sent: by one rank; counted, for allreduce computed (what a ring sends).",
    ]
    if record.world_size > 1:
        notes.append("All ranks are on this machine; between machines communication costs more.")
    if num_threads > record.machine.num_cores:
        notes.append(
            f"{num_threads} threads share {record.machine.num_cores} cores, so ranks also wait for the CPU."
        )
    return "\n".join(notes)
