"""Random models by random recipes, and the table of what was found."""

import importlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def fuzz(monkeypatch):
    """The campaign as a module, which changes signals and the folder of temporary files."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    before = signal.getsignal(signal.SIGTERM)
    yield importlib.import_module("fuzz")
    signal.signal(signal.SIGTERM, before)


def test_a_campaign_that_is_stopped_shows_what_it_has_counted(fuzz, monkeypatch, capsys):
    def run_two(tally, world_size, numbers, deadline):
        assert world_size == 7, "the largest group comes first"
        for number in numbers[:2]:
            tally.add(number, world_size)
        tally.fail(numbers[1], world_size, fuzz.RanksFailed("", {0: "ValueError: planted"}))
        raise KeyboardInterrupt

    monkeypatch.setattr(fuzz, "run_group", run_two)
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--minutes", "5"])
    assert fuzz.main() == 1
    printed = capsys.readouterr().out
    assert "2 cases, 1 wrong" in printed
    assert "stopped early" in printed
    assert "| all | 0 | 0 | 0 | 0 | 0 | 2 | 2 | 1 |" in printed
    assert "ValueError: planted" in printed


@pytest.mark.full
def test_random_models_average_as_they_should_by_random_recipes():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "fuzz.py", "--cases", "24", "--jobs", "2"],
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    assert "24 cases, 0 wrong" in done.stdout
