"""The report page, parsed, and `gradwire report`."""

import dataclasses
import html
import json
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.headroom import Proposal, give_verdict, write_records
from gradwire.planner import Cluster, Forecast
from gradwire.report import render_page
from tests.records import record
from tests.report_records import EVIL, measured, tuned


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


def test_the_page_has_the_verdict_and_every_chart():
    slow = measured(link="100mbit")
    page = Page(render_page([slow, measured(link="1gbit")]))
    assert page.texts["verdict-0"] == give_verdict(slow)
    assert set(page.figures) == {
        *(f"{kind}-{i}" for kind in ("steps", "errors") for i in range(2)),
        "links",
        "workers",
    }
    parts = {trace.get("name"): trace["x"] for trace in page.figures["steps-0"]["data"]}
    assert list(parts)[:3] == ["compute", "exposed communication", "overhead"]
    bf16 = [values[2] for values in list(parts.values())[:3]]
    assert bf16 == pytest.approx([50, 20, 10], rel=0.02)
    lines = page.figures["links"]["data"]
    assert {"allreduce", "bf16", "compute alone"} <= {line["name"] for line in lines}
    points = [(line["x"][0], line["y"][0]) for line in lines if line["name"] == "bf16, measured"]
    assert points == [(rate, pytest.approx(80, rel=0.01)) for rate in (1e8, 1e9)]
    (buttons,) = [menu["buttons"] for menu in page.figures["workers"]["layout"]["updatemenus"]]
    assert [button["label"] for button in buttons] == [
        f"links of {r}" for r in ("100mbit", "1gbit", "10gbit")
    ]
    num_shown = [sum(button["args"][0]["visible"]) for button in buttons]
    assert sum(num_shown) == len(page.figures["workers"]["data"])


def test_a_prediction_goes_through_what_was_measured():
    found = measured(link="100mbit")
    (bf16,) = [row for row in found.rows if row.recipe == "bf16"]
    # 37.8 MB take 3.2 s at 100 Mbit/s: predictions use the bytes of the record.
    bf16 = dataclasses.replace(bf16, bytes_per_step=37_830_144, work_ms=10.0, wait_ms=3200.0)
    found = dataclasses.replace(found, rows=(found.rows[0], found.rows[1], bf16, found.rows[3]))
    forecast = Forecast(found)
    here, twice = (forecast.step_ms(bf16, Cluster(2, bits_per_s=rate)) for rate in (1e8, 2e8))
    assert here == pytest.approx(50 + 3164, rel=0.05)
    assert twice == pytest.approx(50 + 3164 / 2, rel=0.05)
    assert forecast.step_ms(bf16, Cluster(8, bits_per_s=1e8)) > 1.7 * here


def test_gradients_of_two_bytes_make_half_as_many_buckets_of_as_many_values():
    found = measured()
    rows = tuple(dataclasses.replace(row, bucket_mb=5.0) for row in found.rows)
    found = dataclasses.replace(found, bucket_mb=5.0, rows=rows)
    half = dataclasses.replace(found, gradient_bytes=found.gradient_bytes // 2)
    whole_traffic, half_traffic = (
        Forecast(each)._traffic(each.rows[2], Cluster(2)) for each in (found, half)
    )
    for traffic in (whole_traffic, half_traffic):
        assert sum(bucket.num_values for bucket in traffic.buckets) == found.num_parameters
        assert sum(bucket.worker_bytes for bucket in traffic.buckets) == pytest.approx(1_000_000)
        assert sum(bucket.num_messages for bucket in traffic.buckets) == pytest.approx(8)
    assert len(half_traffic.buckets) == pytest.approx(len(whole_traffic.buckets) / 2, rel=0.2)


def test_the_page_has_what_auto_would_send():
    proposal = Proposal("auto:budget=0.2", 250_000, 0.17, (("int2", 7), ("int8", 12)))
    page = render_page([dataclasses.replace(record(allreduce=100, int4=60, noop=50), proposal=proposal)])
    assert "auto:budget=0.2 would send 250,000 bytes a step, 1/4.0 of plain DDP&#x27;s" in page
    assert "<tr><td>int8</td><td>12</td></tr>" in page
    assert "would send" not in render_page([record(allreduce=100, int4=60, noop=50)])


def test_the_page_says_why_it_is_not_known_what_auto_would_send():
    why = "What auto would send is not known: <fully_shard> has sharded the model."
    page = render_page([dataclasses.replace(record(allreduce=100, int4=60, noop=50), no_proposal=why)])
    assert f"<b>auto</b><span>{html.escape(why)}</span>" in page
    assert "<th>encoding</th>" not in page


def test_the_page_has_what_auto_decided():
    text = render_page([tuned(reason=EVIL)])
    assert "<h3>What auto decided</h3>" in text
    cells = ["57", "20.3", "3.9", "20.1", "-", "0.26", "308,304", "int3:44 int8:4", "faster"]
    assert "".join(f"<td>{cell}</td>" for cell in cells) in text
    assert f"<td>{html.escape(EVIL)}</td>" in text
    drawn = {each["name"]: (each["x"], each["y"]) for each in Page(text).figures["decisions-0-0"]["data"]}
    assert drawn == {
        "before": ([10, 57], [26.2, 20.3]),
        "expected": ([10, 57], [20.0, 20.1]),
        "got": ([10], [20.9]),
    }


def test_each_model_of_a_script_has_its_own_decisions():
    text = render_page([tuned(num_models=2)])
    assert text.count('<table class="decisions">') == 2
    assert "<h3>What auto, model 2 decided</h3>" in text


def test_the_page_has_no_decisions_where_there_are_none():
    assert '<table class="decisions">' not in render_page([measured()])


def test_a_saved_run_says_what_auto_ended_with(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(write_records([tuned()]))
    shown = CliRunner().invoke(app, ["report", str(path)]).stdout
    assert "auto: 44 int3, 4 int8 after 58 steps, 308.3 kB a step, error 0.26\n" in shown
    assert "The error of auto is what its budget bounds" in shown


def test_the_page_needs_nothing_from_elsewhere():
    tags = Page(render_page([measured()])).tags
    assert not [attributes for _, attributes in tags if "src" in attributes or "href" in attributes]


def test_whatever_users_named_is_shown_and_never_run():
    text = render_page([measured(workload=EVIL), measured(link=None)], ["a.json", EVIL])
    page = Page(text)
    assert not [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes]
    # The scripts are the figures and the code that draws them. No text looks like a tag.
    assert len([tag for tag, _ in page.tags if tag == "script"]) == len(page.figures) + 1
    assert all("<img" not in json.dumps(figure) for figure in page.figures.values())


def test_the_page_is_small_and_its_colors_are_told_apart_by_everybody():
    many = record(
        allreduce=100, bf16=80, int8=70, int4=60, fp32=99, fp16=81, fp8=71, int2=50, sign=45, noop=40
    )
    text = render_page([many])
    assert len(text) < 100_000
    drawn = Page(text).figures["links"]["data"]
    looks = [(each["line"]["color"], each["line"].get("dash")) for each in drawn if each["mode"] == "lines"]
    assert len(looks) == len(set(looks)) == 10


def test_saved_runs_are_shown_and_compared(tmp_path):
    before, after, page = (tmp_path / name for name in ("before.json", "after.json", "page.html"))
    before.write_text(write_records([measured()]))
    after.write_text(write_records([record(allreduce=50, bf16=40, noop=30)]))
    result = CliRunner().invoke(app, ["report", str(before), str(after), "--html", str(page)])
    assert result.exit_code == 0, result.output
    (line,) = [
        line for line in result.stdout.splitlines() if line.split()[:1] == ["bf16"] and "as fast" in line
    ]
    assert line.split()[1:] == ["80.0", "40.0", "2.00x", "as", "fast"]
    traces = Page(page.read_text()).figures["comparison"]["data"]
    assert [trace["name"] for trace in traces] == ["before.json", "after.json"]


@pytest.mark.parametrize(
    ("page", "code", "why"),
    [
        ("no-such-folder/page.html", 2, "there is no folder no-such-folder"),
        ("/dev/full", 1, "No space left on device"),
    ],
)
def test_a_page_that_cannot_be_written_is_told_with_the_reason(page, code, why, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(write_records([measured()]))
    result = CliRunner().invoke(app, ["report", str(path), "--html", page])
    assert (result.exit_code, result.stderr) == (
        code,
        f"gradwire report: --html: cannot write {page}: {why}\n",
    )


def test_files_of_one_name_are_told_apart(tmp_path):
    paths = [tmp_path / folder / "run.json" for folder in ("before", "after")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(write_records([measured()]))
    shown = CliRunner().invoke(app, ["report", *map(str, paths)]).stdout
    assert all(str(path) in shown.replace("\n", "") for path in paths)


def test_a_recipe_that_cannot_be_predicted_is_left_out_of_the_predictions_alone():
    mixed = record(allreduce=100, bf16=80, **{"schedule(0=bf16; 9=int4)": 70, "of-tomorrow": 60}, noop=50)
    figures = Page(render_page([mixed])).figures
    assert "of-tomorrow" in figures["steps-0"]["data"][0]["y"]
    names = {trace["name"] for trace in figures["links"]["data"]}
    assert {"bf16", "allreduce"} <= names
    assert not names & {"of-tomorrow", "schedule(0=bf16; 9=int4)"}


def test_a_file_that_is_no_record_is_explained(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    for name, message in (("other.json", "'schema_version' is missing"), ("none.json", "No such file")):
        result = CliRunner().invoke(app, ["report", str(tmp_path / name)])
        assert result.exit_code == 2
        assert message in result.stderr
