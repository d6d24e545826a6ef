"""Records: they go to a file and come back the same, or an error says why not."""

import dataclasses
import json
import math

import pytest

from gradwire.headroom import give_verdict, read_records, record_notes, write_records
from tests.records import record
from tests.report_records import tuned


def test_a_record_comes_back_from_json_as_it_was():
    before = record(allreduce=100, bf16=80, noop=70)
    unknown_bytes = dataclasses.replace(before.rows[1], bytes_per_step=None)
    details = dataclasses.replace(unknown_bytes, bucket_mb=8.0, num_messages=4, wait_ms=1.5, work_ms=2.0)
    before = dataclasses.replace(before, link="1gbit", rows=(*before.rows, details))
    assert read_records(write_records([before])) == [before]


def test_a_record_from_before_parameters_were_counted_is_of_fp32_ones():
    before = record(allreduce=100, noop=70)
    data = json.loads(write_records([before]))
    assert data.pop("num_parameters") == before.gradient_bytes // 4
    assert read_records(json.dumps(data)) == [before]


def test_records_tell_if_ranks_took_turns_on_a_gpu_and_earlier_ones_do_not():
    before = dataclasses.replace(record(allreduce=100, noop=70), takes_turns=True)
    data = json.loads(write_records([before]))
    assert read_records(json.dumps(data)) == [before]
    (note,) = [note for note in record_notes(before) if "take turns on a GPU" in note]
    del data["takes_turns"]
    (earlier,) = read_records(json.dumps(data))
    assert earlier == dataclasses.replace(before, takes_turns=False)
    assert note not in record_notes(earlier)


def test_decisions_come_back_from_json_and_earlier_rows_have_none():
    before = tuned(num_models=2)
    data = json.loads(write_records([before]))
    assert read_records(json.dumps(data)) == [before]
    for row in data["rows"]:
        del row["decisions"]
    assert [row.decisions for row in read_records(json.dumps(data))[0].rows] == [(), (), ()]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("step", -1, "'step' must be from 0"),
        ("got_ms", "20", "'got_ms' must be float or int or null"),
        ("counts", [["int3"]], "'counts' must be a list of encodings"),
        ("reason", "\x1b[31m", "'reason' must be at most"),
    ],
)
def test_a_damaged_decision_says_what_is_wrong(field, value, message):
    data = json.loads(write_records([tuned()]))
    data["rows"][1]["decisions"][0][0][field] = value
    with pytest.raises(ValueError, match=message):
        read_records(json.dumps(data))


def test_decisions_are_those_of_models():
    data = json.loads(write_records([tuned()]))
    data["rows"][1]["decisions"] = [[]]
    with pytest.raises(ValueError, match="'decisions' must be a list of decisions for each model"):
        read_records(json.dumps(data))


def test_json_has_the_figures_a_reader_wants():
    row = json.loads(write_records([record(allreduce=100, noop=70)]))["rows"][0]
    assert row["recipe"] == "allreduce"
    assert row["step_ms"] == pytest.approx(100, rel=0.01)
    assert row["spread_ms"][0] < row["step_ms"] < row["spread_ms"][1]


def change(key, value):
    return lambda data: data.update({key: value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("schema_version", 99), "schema version 99, and this gradwire reads version 2"),
        (lambda data: data.pop("schema_version"), "'schema_version' is missing"),
        (lambda data: data.pop("world_size"), "'world_size' is missing"),
        (change("world_size", "two"), "'world_size' must be int, not \"two\""),
        (change("world_size", True), "'world_size' must be int, not true"),
        (change("world_size", 0), "'world_size' must be from 1 to 100000, not 0"),
        (change("gradient_bytes", 0), "'gradient_bytes' must be from 1 to 1e\\+15, not 0"),
        (change("num_parameters", 0), "'num_parameters' must be from 1 to 1e\\+13, not 0"),
        (change("link", "fast"), "such as 100mbit, not 'fast'"),
        (lambda data: data["machine"].update(num_cores=0), "'num_cores' must be from 1 to 1e\\+06, not 0"),
        (change("machine", None), "'machine' must be dict, not null"),
        (change("rows", []), "needs one row 'allreduce'"),
        (change("rows", [3]), "an object with 'samples_ms' was expected, not 3"),
        (lambda data: data["rows"].pop(), "needs one row 'noop'"),
        (lambda data: data["rows"][0].update(samples_ms=["1"]), "must be a list of numbers"),
        (lambda data: data["rows"][0].update(samples_ms=[]), "'allreduce' has no samples"),
        (lambda data: data["rows"][0].update(samples_ms=[0]), "numbers from 1e-06 to 1e\\+12"),
        (lambda data: data["rows"][0].update(samples_ms=[1.0]), "different numbers of samples"),
        (lambda data: data["rows"].append(data["rows"][0]), "needs one row 'allreduce'"),
        (change("rows", [{}] * 1001), "at most 1000 rows, not 1001"),
        (change("bucket_mb", math.nan), "NaN is not a number that JSON allows"),
        (change("bucket_mb", -1.0), "'bucket_mb' must be from 1e-06 to 1e"),
        (change("link", "9" * 400 + "gbit"), "such as 100mbit"),
        (change("device", "cpu\x1b[31m"), "'device' must be at most 100000 printable characters"),
        (change("workload", "train\udcff.py"), "'workload' must be at most 100000 printable characters"),
        (lambda data: data["rows"][0].update(wait_ms=-1), "'wait_ms' must be from 0 to 1e"),
        (lambda data: data["rows"][0].update(bytes_per_step=10**400), "'bytes_per_step' must be from 0"),
    ],
)
def test_a_damaged_record_says_what_is_wrong(damage, message):
    data = json.loads(write_records([record(allreduce=100, noop=70)]))
    damage(data)
    with pytest.raises(ValueError, match=message):
        read_records(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "no json", "[" * 100_000, "9" * 5000])
def test_what_is_no_record_is_refused(text):
    with pytest.raises(ValueError, match="not a headroom record: "):
        read_records(text)


def test_a_step_is_compute_exposed_communication_and_overhead():
    whole = record(allreduce=100, bf16=80, noop=50)
    bf16 = dataclasses.replace(whole.rows[1], wait_ms=20.0, work_ms=10.0)
    parts = dataclasses.replace(whole, rows=(whole.rows[0], bf16, whole.rows[2]))
    assert parts.split_ms(bf16) == pytest.approx((50, 20, 10), rel=0.02)
    assert parts.split_ms(parts.allreduce) == pytest.approx((50, 50, 0), rel=0.02)
    assert parts.split_ms(parts.noop) == pytest.approx((50, 0, 0), rel=0.02)


def test_a_sweep_is_a_list_of_records():
    records = [record(allreduce=100, noop=ms) for ms in (60, 70)]
    assert read_records(write_records(records)) == records


def test_a_file_says_what_follows_from_it():
    slow = json.loads(write_records([record(allreduce=100, bf16=60, noop=50)]))
    assert slow["recommended"] == {"recipe": "bf16", "bucket_mb": None}
    assert slow["verdict"] == give_verdict(record(allreduce=100, bf16=60, noop=50))
    assert json.loads(write_records([record(allreduce=100, bf16=99, noop=97)]))["recommended"] is None
