"""Records as JSON: the figures, and for the reader the verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gradwire.headroom.records import Machine, Record, Row
from gradwire.headroom.verdict import give_verdict, recommend

SCHEMA_VERSION = 2


def write_records(records: Sequence[Record]) -> str:
    """Return one record as a JSON object, or several as a list, for `read_records`."""
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
    """Read back what `write_records` wrote. Raises ValueError that says what is wrong with the text."""
    try:
        data = json.loads(text)
        items = data if isinstance(data, list) and data else [data]
        versions = [read_field(item, "schema_version", int) for item in items]
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
    """Return a record with the number of parameters, which earlier ones of fp32 models left out."""
    if "num_parameters" in data:
        return data
    return {**data, "num_parameters": read_field(data, "gradient_bytes", int) // 4}


def _read_record(data: object) -> Record:
    machine = read_field(data, "machine", dict)
    return Record(
        gradwire_version=read_field(data, "gradwire_version", str),
        torch_version=read_field(data, "torch_version", str),
        date=read_field(data, "date", str),
        machine=Machine(
            read_field(machine, "cpu", str),
            read_field(machine, "num_cores", int),
            read_field(machine, "platform", str),
        ),
        world_size=read_field(data, "world_size", int),
        threads_per_rank=read_field(data, "threads_per_rank", int),
        backend=read_field(data, "backend", str),
        device=read_field(data, "device", str),
        link=read_field(data, "link", str, None),
        one_machine=read_field(data, "one_machine", bool),
        interleaved=read_field(data, "interleaved", bool),
        bucket_mb=read_field(data, "bucket_mb", float, int, None),
        workload=read_field(data, "workload", str),
        num_parameters=read_field(data, "num_parameters", int),
        gradient_bytes=read_field(data, "gradient_bytes", int),
        rows=tuple(map(_read_row, read_field(data, "rows", list))),
    )


def _read_row(data: object) -> Row:
    samples = read_field(data, "samples_ms", list)
    if not all(type(ms) in (int, float) for ms in samples):
        raise ValueError("'samples_ms' must be a list of numbers")
    return Row(
        recipe=read_field(data, "recipe", str),
        samples_ms=tuple(map(float, samples)),
        bytes_per_step=read_field(data, "bytes_per_step", int, None),
        bucket_mb=read_field(data, "bucket_mb", float, int, None),
        num_messages=read_field(data, "num_messages", int, None),
        wait_ms=read_field(data, "wait_ms", float, int, None),
        work_ms=read_field(data, "work_ms", float, int, None),
        gradient_error=read_field(data, "gradient_error", float, int, None),
    )


def read_field(data: object, key: str, *kinds: type | None) -> Any:
    """Return ``data[key]``. Raises ValueError if it is missing or of another type; None stands for null."""
    if not isinstance(data, dict):
        raise ValueError(f"an object with {key!r} was expected, not {json.dumps(data)[:40]}")
    if key not in data:
        raise ValueError(f"{key!r} is missing")
    value = data[key]
    # By type(), because isinstance() takes True for an int.
    if (None if value is None else type(value)) not in kinds:
        expected = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise ValueError(f"{key!r} must be {expected}, not {json.dumps(value)[:40]}")
    return value
