"""`gradwire report` on records that somebody has edited: shown, or refused in one line."""

import copy
import json
import os

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.headroom import read_records, write_records
from gradwire.report import render_page
from tests.report_records import measured, tuned

WRITTEN = json.loads(write_records([measured(link="1gbit")]))
NAMES = ["int8", "int8:local_size=8", "sign", "powersgd:rank=3", "bf61", "route(*=int8)", "noop", "allreduce"]
VALUES = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 2, 3, 1e-6, 0.5, 1e300, 1e-300, 10**15, 10**30, -(10**400), 1e999]
    ),
    st.sampled_from([float("nan"), "", "\udcff", "\x1b[31m", "<b>", "100mbit", "0.001kbit", [], {}, [[]]]),
    st.sampled_from(NAMES),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.floats(0, 1e13), max_size=3),
)
REMOVED = object()


def places(data, path=()):
    """Yield the path of each value in a JSON value."""
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


# Samples are many and alike: the first of each row is enough.
PLACES = [path for path in places(WRITTEN) if path[2:3] != ("samples_ms",) or path[3:] in ((), (0,))]
EDITS = st.lists(
    st.tuples(st.sampled_from(PLACES), st.one_of(VALUES, st.just(REMOVED))), min_size=1, max_size=3
)


def edited(edits):
    data = copy.deepcopy(WRITTEN)
    for path, value in edits:
        try:
            inside = data
            for key in path[:-1]:
                inside = inside[key]
            if value is REMOVED:
                del inside[path[-1]]
            else:
                inside[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            pass  # an earlier edit has taken the place away
    return data


def check(path, data):
    path.write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["report", str(path)])
    if result.exit_code == 0:
        page = render_page(read_records(path.read_text()))
        page.encode()
    else:
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"gradwire report: {path}: ")
        assert result.stderr.count("\n") == 1


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(edits=EDITS)
@example(edits=[(("rows", 1, "recipe"), "int8:local_size=8")])
@example(edits=[(("rows", 1, "recipe"), "powersgd:rank=" + "9" * 30)])
@example(edits=[(("link",), "0.0001kbit")])
@example(edits=[(("world_size",), 3), (("num_parameters",), 10**9)])
@example(edits=[(("rows", i, "samples_ms"), [1e-6]) for i in range(4)])
@example(edits=[(("rows", i, "samples_ms"), [1e12]) for i in range(4)])
@example(edits=[(("bucket_mb",), 1e-6), *((("rows", i, "bucket_mb"), 1e-6) for i in range(4))])
@example(edits=[(("gradient_bytes",), 1), (("rows", 2, "work_ms"), 1e12), (("rows", 2, "wait_ms"), 0)])
@example(edits=[(("schema_version",), 3), (("gradwire_version",), "\udcff")])
def test_an_edited_record_is_shown_or_refused_in_one_line(tmp_path, edits):
    check(tmp_path / "record.json", edited(edits))


@pytest.mark.parametrize("value", [0, 1e-300, 10**12])
def test_decisions_of_any_size_are_shown(tmp_path, value):
    data = json.loads(write_records([tuned()]))
    for decision in data["rows"][1]["decisions"][0]:
        decision.update(step=int(value), step_ms=value, exposed_ms=None, error=value, counts=[])
    check(tmp_path / "record.json", data)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe", "it is not text in UTF-8"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"schema_version": 2, "machine": ' + b"[" * 900 + b"]" * 900 + b"}", "'machine' must be dict"),
        (json.dumps({**WRITTEN, "schema_version": 2}).replace("1gbit", "fast").encode(), "such as 100mbit"),
    ],
)
def test_content_that_is_no_record_is_refused_in_one_line(tmp_path, content, why):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"gradwire report: {path}: ")
    assert why in result.stderr or "is missing" in result.stderr


def test_a_file_whose_name_is_not_utf8_is_shown_and_refused_like_any_other(tmp_path):
    path = tmp_path / os.fsdecode(b"record\xff.json")
    path.write_text(json.dumps(WRITTEN))
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(path), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "record\\udcff.json" in result.stdout
    assert "record\\udcff.json" in page.read_text(encoding="utf-8")
    path.write_text("{}")
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 2
    assert "record\\udcff.json: not a headroom record" in result.stderr
