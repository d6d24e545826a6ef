"""Records as JSON: what was measured, and for the reader what follows from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gradwire.headroom.records import Machine, Record, Row
from gradwire.headroom.verdict import give_verdict, recommend

SCHEMA_VERSION = 2


def write_records(records: Sequence[Record]) -> str:
    """One record as an object, several as a list; `read_records` makes the same of it again."""
    written = [_write_record(record) for record in records]
    return json.dumps(written if len(written) > 1 else written[0], indent=2, allow_nan=False) + "\n"


def _write_record(record: Record) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    for row, row_fields in zip(record.rows, fields["rows"], strict=True):
        row_fields.update(step_ms=row.step_ms, spread_ms=row.spread_ms, gain=record.gain(row))
    use = recommend(record)
    concluded = {
        "verdict": give_verdict(record),
        "recommended": None if use is None else {"recipe": use.recipe, "bucket_mb": use.bucket_mb},
    }
    return {"schema_version": SCHEMA_VERSION, **concluded, **fields}


def read_records(text: str) -> list[Record]:
    """What `write_records` wrote. Raises ValueError that says what is wrong with the text."""
    try:
        data = json.loads(text)
        items = data if isinstance(data, list) and data else [data]
        versions = [take(item, "schema_version", int) for item in items]
        if set(versions) == {SCHEMA_VERSION}:
            return [_read_record(_completed(item)) for item in items]
    except ValueError as error:  # JSONDecodeError is one
        raise ValueError(f"not a headroom record: {error}") from None
    raise ValueError(
        f"this headroom record has schema version {versions[0]}, and this gradwire reads version "
        f"{SCHEMA_VERSION}: read it with the gradwire that wrote it, "
        f"{items[0].get('gradwire_version', 'unknown')}"
    )


def _completed(data: dict[str, Any]) -> dict[str, Any]:
    """A record as it is written now: earlier ones took every parameter for an fp32 one."""
    if "num_parameters" in data:
        return data
    return {**data, "num_parameters": take(data, "gradient_bytes", int) // 4}


def _read_record(data: object) -> Record:
    machine = take(data, "machine", dict)
    return Record(
        gradwire_version=take(data, "gradwire_version", str),
        torch_version=take(data, "torch_version", str),
        date=take(data, "date", str),
        machine=Machine(
            take(machine, "cpu", str), take(machine, "num_cores", int), take(machine, "platform", str)
        ),
        world_size=take(data, "world_size", int),
        threads_per_rank=take(data, "threads_per_rank", int),
        backend=take(data, "backend", str),
        device=take(data, "device", str),
        link=take(data, "link", str, None),
        one_machine=take(data, "one_machine", bool),
        interleaved=take(data, "interleaved", bool),
        bucket_mb=take(data, "bucket_mb", float, int, None),
        workload=take(data, "workload", str),
        num_parameters=take(data, "num_parameters", int),
        gradient_bytes=take(data, "gradient_bytes", int),
        rows=tuple(map(_read_row, take(data, "rows", list))),
    )


def _read_row(data: object) -> Row:
    samples = take(data, "samples_ms", list)
    if not all(type(ms) in (int, float) for ms in samples):
        raise ValueError("'samples_ms' must be a list of numbers")
    return Row(
        recipe=take(data, "recipe", str),
        samples_ms=tuple(map(float, samples)),
        bytes_per_step=take(data, "bytes_per_step", int, None),
        bucket_mb=take(data, "bucket_mb", float, int, None),
        num_messages=take(data, "num_messages", int, None),
        wait_ms=take(data, "wait_ms", float, int, None),
        work_ms=take(data, "work_ms", float, int, None),
        gradient_error=take(data, "gradient_error", float, int, None),
    )


def take(data: object, key: str, *kinds: type | None) -> Any:
    """``data[key]`` if it is of one of the kinds; None stands for null."""
    if not isinstance(data, dict):
        raise ValueError(f"an object with {key!r} was expected, not {json.dumps(data)[:40]}")
    if key not in data:
        raise ValueError(f"{key!r} is missing")
    value = data[key]
    # By type(), as isinstance() takes True for an int.
    if (None if value is None else type(value)) not in kinds:
        expected = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise ValueError(f"{key!r} must be {expected}, not {json.dumps(value)[:40]}")
    return value
