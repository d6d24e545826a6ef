"""The report page, parsed, and `gradwire report`."""

import dataclasses
import json
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.headroom import give_verdict, write_records
from gradwire.report import ReportUnavailable, render_page
from tests.test_headroom import record

EVIL = '</script><script>alert("1")</script><img src=x onerror=alert(2)>'


class Page(HTMLParser):
    """Texts by id, the figures, and every tag."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.figures = [], {}, {}
        self._id = self._figure = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self._id = attributes.get("id")
        self._figure = attributes.get("data-target")

    def handle_data(self, data):
        if self._figure:
            self.figures[self._figure] = json.loads(data)
        elif self._id:
            self.texts[self._id] = data
        self._id = self._figure = None


def measured(**more):
    found = record(allreduce=100, fp32=99, bf16=80, noop=50)
    rows = tuple(
        dataclasses.replace(row, gradient_error=1e-3, wait_ms=20.0, work_ms=10.0, num_messages=8)
        if row.recipe == "bf16"
        else row
        for row in found.rows
    )
    return dataclasses.replace(found, rows=rows, **more)


def test_the_page_has_the_verdict_and_every_chart():
    slow = measured(link="100mbit")
    page = Page(render_page([slow, measured(link="1gbit")]))
    assert page.texts["verdict-0"] == give_verdict(slow)
    assert set(page.figures) == {
        *(f"{kind}-{i}" for kind in ("steps", "errors") for i in range(2)),
        "links",
        "workers",
    }
    parts = {trace["name"]: trace["x"] for trace in page.figures["steps-0"]["data"]}
    assert list(parts) == ["compute", "exposed communication", "overhead"]
    bf16 = [values[2] for values in parts.values()]
    assert bf16 == pytest.approx([50, 20, 10], rel=0.02)
    names = [trace["name"] for trace in page.figures["links"]["data"]]
    assert {"allreduce", "bf16", "measured at 100mbit", "measured at 1gbit"} <= set(names)


def test_the_page_needs_nothing_from_elsewhere():
    tags = Page(render_page([measured()])).tags
    assert not [attributes for _, attributes in tags if "src" in attributes or "href" in attributes]


def test_whatever_users_named_is_shown_and_never_run():
    text = render_page([measured(workload=EVIL), measured(link=None)], ["a.json", EVIL])
    page = Page(text)
    assert not [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes]
    # Plotly itself, the figures and what draws them; and no text that plotly would take for a tag.
    assert len([tag for tag, _ in page.tags if tag == "script"]) == len(page.figures) + 2
    assert all("<img" not in json.dumps(figure) for figure in page.figures.values())


def test_without_plotly_the_hint_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("gradwire.report.page.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ReportUnavailable, match=r"pip install 'gradwire\[report\]'"):
        render_page([measured()])
    result = CliRunner().invoke(app, ["headroom", "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 2
    assert "gradwire[report]" in result.stderr


def test_saved_runs_are_shown_and_compared(tmp_path):
    before, after, page = (tmp_path / name for name in ("before.json", "after.json", "page.html"))
    before.write_text(measured().to_json())
    after.write_text(write_records([record(allreduce=50, bf16=40, noop=30)]))
    result = CliRunner().invoke(app, ["report", str(before), str(after), "--html", str(page)])
    assert result.exit_code == 0, result.output
    (line,) = [
        line for line in result.stdout.splitlines() if line.split()[:1] == ["bf16"] and "as fast" in line
    ]
    assert line.split()[1:] == ["80.0", "40.0", "2.00x", "as", "fast"]
    traces = Page(page.read_text()).figures["comparison"]["data"]
    assert [trace["name"] for trace in traces] == ["before.json", "after.json"]


def test_a_file_that_is_no_record_is_explained(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    for name, message in (("other.json", "'schema_version' is missing"), ("none.json", "No such file")):
        result = CliRunner().invoke(app, ["report", str(tmp_path / name)])
        assert result.exit_code == 2
        assert message in result.stderr
