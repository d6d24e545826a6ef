"""The example that trains a language model, and the benchmark that compares recipes with it."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["--steps", "6", "--width", "32", "--layers", "1", "--length", "16", "--batch", "1", "--workers", "8"]


def python(*arguments, returncode=0):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == returncode, done.stdout + done.stderr
    return done.stdout


def benchmark(*arguments, returncode=0):
    return python(ROOT / "benchmarks" / "convergence.py", *arguments, returncode=returncode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("convergence")
    benchmark(*TINY, "--out", out, "--seeds", 0, "--recipes", "fp32", "int8")
    return out


def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path):
    def train(steps):
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", 2, ROOT / "examples" / "train_lm.py"]
        options = f"--recipe fp32 --steps {steps} --every 2 --width 32 --layers 1 --batch 2".split()
        return python(*launch, *options, "--checkpoint", tmp_path)

    assert len((ROOT / "examples" / "train_lm.py").read_text().splitlines()) < 150
    first = float(re.search(r"held-out loss (\S+) nats a byte", train(2))[1])
    second = train(12)
    assert float(re.search(r"held-out loss (\S+) nats a byte", second)[1]) < first
    # Ten steps of the second run alone: 21184 parameters, of which each of two ranks sends all.
    assert re.search(r", 0\.8 MB sent by a rank", second)


def test_a_row_that_is_there_is_not_run_again_and_one_that_is_not_is_added(folder):
    before = (folder / "small.csv").read_text()
    said = benchmark(*TINY, "--out", folder, "--seeds", 0, "--recipes", "fp32", "int8", "fp99")
    assert "there is no recipe fp99: skipped" in said
    assert (folder / "small.csv").read_text() == before
    benchmark(*TINY, "--out", folder, "--seeds", 0, 1, "--recipes", "fp32")
    rows = list(csv.DictReader((folder / "small.csv").open()))
    assert [(row["recipe"], row["seed"]) for row in rows] == [("fp32", "0"), ("int8", "0"), ("fp32", "1")]
    assert rows[0]["curve"].split()[0] == rows[1]["curve"].split()[0], "both start with the same weights"


def test_rows_of_another_setting_are_not_mixed_in(folder):
    said = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "convergence.py", "--out", folder],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert said.returncode == 1
    assert "has rows of another setting" in said.stderr


def test_a_row_that_would_not_be_ready_in_time_is_given_up(tmp_path):
    options = [*TINY, "--steps", 100_000, "--minutes", 0.2, "--recipes", "fp32", "--out", tmp_path]
    assert "run this again" in benchmark(*options, returncode=3)
    assert not (tmp_path / "small.csv").exists()


def test_the_table_and_the_plot_show_every_recipe(folder, tmp_path):
    plot = tmp_path / "curves.svg"
    said = benchmark("--table", folder / "small.csv", "--plot", folder / "small.csv", plot)
    assert re.search(r"\| `int8` \| .* \| 4\.0x \| .* \| [+-]\d\.\d\d % \(.*\) \| 1 \|", said)
    assert plot.read_text().count("<polyline") == 3 * 2


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("fidelity-*.csv")), ids=lambda path: path.stem)
def test_the_page_shows_the_table_of_the_runs_beside_it(path):
    assert benchmark("--table", path).strip() in (ROOT / "docs" / "fidelity.md").read_text()
