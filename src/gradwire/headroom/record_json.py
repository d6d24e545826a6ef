"""Records as JSON: the figures, and for the reader the verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gradwire.headroom.json_fields import parse_json, read_field, read_number, read_text, read_whole
from gradwire.headroom.outer_loops import OUTER_RECIPE, OuterPrediction
from gradwire.headroom.records import Machine, Proposal, Record, Row
from gradwire.headroom.verdict import give_verdict, propose_outer_loop, recommend
from gradwire.tuning import DecisionSummary

SCHEMA_VERSION = 2

# Bounds of a record's figures, far beyond every measurement. Within them, tables and charts can be computed.
_MAX_ROWS, _MAX_SAMPLES = 1000, 100_000
_MAX_RANKS, _MAX_THREADS = 100_000, 1_000_000
_MAX_PARAMETERS, _MAX_BYTES, _MAX_MESSAGES = 10**13, 10**15, 10**12
_MIN_MB, _MAX_MB = 1e-6, 1e9
_MIN_MS, _MAX_MS = 1e-6, 1e12
_MAX_ERROR = 1e12
_MAX_DECISIONS, _MAX_STEP = 10_000, 10**12


def write_records(records: Sequence[Record]) -> str:
    """Return one record as a JSON object, or several as a list, for `read_records`."""
    written = [_write_record(record) for record in records]
    return json.dumps(written if len(written) > 1 else written[0], indent=2, allow_nan=False) + "\n"


def _write_record(record: Record) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    for row, row_fields in zip(record.rows, fields["rows"], strict=True):
        row_fields.update(step_ms=row.step_ms, spread_ms=row.spread_ms, gain=record.gain(row))
    use = recommend(record)
    outer = propose_outer_loop(record)
    concluded = {
        "verdict": give_verdict(record),
        "recommended": None if use is None else {"recipe": use.recipe, "bucket_mb": use.bucket_mb},
        "outer_loop": None if outer is None else _write_outer_loop(outer),
    }
    return {"schema_version": SCHEMA_VERSION, **concluded, **fields}


def _write_outer_loop(outer: OuterPrediction) -> dict[str, Any]:
    return {
        "recipe": OUTER_RECIPE,
        "period": outer.period,
        "fragments": outer.fragments,
        "delay": outer.delay,
        "step_ms": 1e3 * outer.step_s,
        "bytes_per_step": outer.bytes_per_step,
        "bytes_per_turn": outer.turn_bytes,
    }


def read_records(text: str) -> list[Record]:
    """Read back what `write_records` wrote. Raises ValueError that says what is wrong with the text."""
    try:
        data = parse_json(text)
        items = data if isinstance(data, list) and data else [data]
        versions = [read_field(item, "schema_version", int) for item in items]
        if set(versions) == {SCHEMA_VERSION}:
            return [_read_record(_completed(item)) for item in items]
    except ValueError as error:  # JSONDecodeError is one
        raise ValueError(f"not a headroom record: {error}") from None
    raise ValueError(
        f"this headroom record has schema version {versions[0]}, and this gradwire reads version "
        f"{SCHEMA_VERSION}: read it with the gradwire that wrote it, "
        f"{_shown_version(items[0])}"
    )


def _shown_version(data: dict[str, Any]) -> str:
    """Return the version that wrote a record, if it says so."""
    try:
        return str(read_text(data, "gradwire_version"))
    except ValueError:
        return "unknown"


def _completed(data: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the fields that earlier ones left out."""
    completed = {"sharding": None, "no_proposal": None, "num_layers": None, "takes_turns": False, **data}
    if "num_parameters" not in data:  # the model was of fp32 parameters
        completed["num_parameters"] = read_field(data, "gradient_bytes", int) // 4
    return completed


def _read_record(data: object) -> Record:
    machine = read_field(data, "machine", dict)
    rows = read_field(data, "rows", list)
    if len(rows) > _MAX_ROWS:
        raise ValueError(f"'rows' must have at most {_MAX_ROWS} rows, not {len(rows)}")
    return Record(
        gradwire_version=read_text(data, "gradwire_version"),
        torch_version=read_text(data, "torch_version"),
        date=read_text(data, "date"),
        machine=Machine(
            read_text(machine, "cpu"),
            read_whole(machine, "num_cores", 1, _MAX_THREADS),
            read_text(machine, "platform"),
        ),
        world_size=read_whole(data, "world_size", 1, _MAX_RANKS),
        threads_per_rank=read_whole(data, "threads_per_rank", 1, _MAX_THREADS),
        backend=read_text(data, "backend"),
        device=read_text(data, "device"),
        link=read_text(data, "link", or_null=True),
        one_machine=read_field(data, "one_machine", bool),
        interleaved=read_field(data, "interleaved", bool),
        bucket_mb=read_number(data, "bucket_mb", _MIN_MB, _MAX_MB, or_null=True),
        workload=read_text(data, "workload"),
        num_parameters=read_whole(data, "num_parameters", 1, _MAX_PARAMETERS),
        gradient_bytes=read_whole(data, "gradient_bytes", 1, _MAX_BYTES),
        rows=tuple(map(_read_row, rows)),
        delay=read_text(data, "delay", or_null=True),
        proposal=_read_proposal(data),
        sharding=read_text(data, "sharding", or_null=True),
        no_proposal=read_text(data, "no_proposal", or_null=True),
        num_layers=read_whole(data, "num_layers", 1, _MAX_PARAMETERS, or_null=True),
        takes_turns=read_field(data, "takes_turns", bool),
    )


def _read_proposal(data: object) -> Proposal | None:
    """Return what ``auto`` would send; None if the record does not say."""
    if not isinstance(data, dict) or data.get("proposal") is None:
        return None
    found = read_field(data, "proposal", dict)
    return Proposal(
        read_text(found, "recipe"),
        read_whole(found, "bytes_per_step", 0, _MAX_BYTES),
        read_number(found, "error", 0, _MAX_ERROR, or_null=True),
        _read_counts(found),
    )


def _read_counts(data: object) -> tuple[tuple[str, int], ...]:
    """Return the number of parameters of each encoding."""
    counts = read_field(data, "counts", list)
    for pair in counts:
        if not (isinstance(pair, list) and [type(each) for each in pair] == [str, int]):
            raise ValueError("'counts' must be a list of encodings and numbers of parameters")
    return tuple((read_text({"encoding": name}, "encoding"), count) for name, count in counts)


def _read_row(data: object) -> Row:
    samples = read_field(data, "samples_ms", list)
    if not all(type(ms) in (int, float) for ms in samples):
        raise ValueError("'samples_ms' must be a list of numbers")
    if len(samples) > _MAX_SAMPLES or not all(_MIN_MS <= ms <= _MAX_MS for ms in samples):
        raise ValueError(
            f"'samples_ms' must be at most {_MAX_SAMPLES} numbers from {_MIN_MS:g} to {_MAX_MS:g}"
        )
    return Row(
        recipe=read_text(data, "recipe"),
        samples_ms=tuple(map(float, samples)),
        bytes_per_step=read_whole(data, "bytes_per_step", 0, _MAX_BYTES, or_null=True),
        bucket_mb=read_number(data, "bucket_mb", _MIN_MB, _MAX_MB, or_null=True),
        num_messages=read_whole(data, "num_messages", 0, _MAX_MESSAGES, or_null=True),
        wait_ms=read_number(data, "wait_ms", 0, _MAX_MS, or_null=True),
        work_ms=read_number(data, "work_ms", 0, _MAX_MS, or_null=True),
        gradient_error=read_number(data, "gradient_error", 0, _MAX_ERROR, or_null=True),
        decisions=_read_decisions(data),
    )


def _read_decisions(data: object) -> tuple[tuple[DecisionSummary, ...], ...]:
    """Return the decisions of ``auto`` for each model; rows of earlier records have none."""
    if not isinstance(data, dict) or "decisions" not in data:
        return ()
    models = read_field(data, "decisions", list)
    if not all(isinstance(model, list) and model for model in models):
        raise ValueError("'decisions' must be a list of decisions for each model")
    if sum(map(len, models)) > _MAX_DECISIONS:
        raise ValueError(f"'decisions' must have at most {_MAX_DECISIONS} decisions")
    return tuple(tuple(map(_read_decision, model)) for model in models)


def _read_decision(data: object) -> DecisionSummary:
    def read_ms(key: str) -> Any:
        return read_number(data, key, 0, _MAX_MS, or_null=True)

    return DecisionSummary(
        step=read_whole(data, "step", 0, _MAX_STEP),
        step_ms=read_ms("step_ms"),
        exposed_ms=read_ms("exposed_ms"),
        expected_ms=read_ms("expected_ms"),
        got_ms=read_ms("got_ms"),
        error=read_number(data, "error", 0, _MAX_ERROR, or_null=True),
        bytes_per_step=read_whole(data, "bytes_per_step", 0, _MAX_BYTES),
        counts=_read_counts(data),
        reason=read_text(data, "reason"),
    )
