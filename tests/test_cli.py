"""Rules that hold for all commands."""

import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.cli.consoles import open_console
from gradwire.cli.outputs import RecordOutput
from gradwire.headroom import step_table
from gradwire.planner import Cluster, step_traffic
from tests.records import record

COMMANDS = {each.callback.__name__: each.callback for each in app.registered_commands}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_lower_case_whichever_typer_reads_them(name):
    command = typer.main.get_command(app).commands[name]
    names = [option for parameter in command.params for option in parameter.opts]
    assert names == [option.lower() for option in names]
    # Some versions of typer make an option `--DEVICE` of a metavar that equals the option's name.
    hints = typing.get_type_hints(COMMANDS[name], include_extras=True)
    options = {
        parameter: each
        for parameter, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, OptionInfo)
    }
    assert len(options) == sum(isinstance(each, typer.core.TyperOption) for each in command.params)
    for parameter, option in options.items():
        is_named_after_itself = (option.metavar or "").lower().replace("-", "_") == parameter
        # Within `Annotated`, typer keeps the first declaration in `default`.
        is_spelled_out = isinstance(option.default, str)
        assert is_spelled_out or not is_named_after_itself, f'spell out "--{parameter}"'


@pytest.mark.parametrize("name", COMMANDS)
def test_lines_of_help_fit_a_terminal_of_80_columns(name):
    lines = inspect.getdoc(COMMANDS[name]).splitlines()[1:]  # the first is wrapped as it should be
    assert [line for line in lines if len(line) > 78] == []


def test_the_list_of_recipes_says_what_the_bytes_of_low_rank_depend_on():
    shown = " ".join(CliRunner().invoke(app, ["recipes"]).stdout.split())
    assert "about 1/120 for a matrix of 1000 x 1000, 1/30 for one of 256 x 256" in shown
    for recipe, size, share in (("powersgd", 1000, 120), ("powersgd", 256, 30), ("acp", 1000, 240)):
        sent, plain = (step_traffic(r, [(size, size)], Cluster(2)).buckets[0] for r in (recipe, "fp32"))
        assert plain.worker_bytes / sent.worker_bytes == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("columns", ["0", "1", "20", "200"])
def test_figures_are_whole_however_narrow_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    open_console().print(step_table(record(allreduce=100, fp32=90, int8=51.5, noop=40)))
    shown = capsys.readouterr().out
    assert "51.5" in shown
    assert "…" not in shown


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
@pytest.mark.parametrize(
    ("option", "files"), [("--json", ("/dev/full", None)), ("--html", (None, Path("/dev/full")))]
)
def test_a_record_that_cannot_be_written_is_no_failed_measurement(option, files, capsys):
    output = RecordOutput(*files, quiet=True)
    with pytest.raises(typer.Exit) as ended:
        output.write([record(allreduce=100, bf16=60, noop=40)])
    assert ended.value.exit_code == 1
    said = f"gradwire headroom: {option}: cannot write /dev/full: No space left on device\n"
    assert capsys.readouterr().err == said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
@pytest.mark.parametrize("words", [[], ["recipes"], ["--version"]], ids=" ".join)
def test_a_full_disk_is_told_in_one_line(words):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "gradwire", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    text = "gradwire: the output cannot be written: No space left on device. Give it another place\n"
    assert (ended.returncode, ended.stderr) == (1, text)
