"""The README's example runs as it stands, and its figures are those of the pages it sends readers to."""

import csv
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def table_after(text, heading):
    """The first table after a heading: its cells by the name of the row and of the column."""
    lines = text.partition(f"# {heading}\n")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    num_rows = next(i for i, line in enumerate([*lines[first:], ""]) if not line.startswith("|"))
    header, _, *rows = rows[:num_rows]
    return {row[0].strip("`"): dict(zip(header, row, strict=True)) for row in rows}


def test_the_readmes_example_runs_under_torchrun(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 12
    (tmp_path / "train.py").write_text(example)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    done = subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WireStats(num_steps=10, bytes_sent=") == 2


def test_the_readme_has_both_commands_and_how_to_install():
    blocks = re.findall(r"```\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    for command in ("make headroom", "make test", "pip install ."):
        assert any(line.split("#")[0].strip() == command for line in lines), command


def test_bytes_and_loss_gaps_are_those_of_the_measured_runs():
    with (ROOT / "docs" / "fidelity-real.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    base = {run["seed"]: run for run in runs if run["recipe"] == "fp32"}
    shown = table_after(README, "Choose a recipe")
    assert {"bf16", "int8", "int4", "sign", "powersgd"} <= set(shown)
    for recipe, row in shown.items():
        own = [run for run in runs if run["recipe"] == recipe]
        gaps = [float(r["held_out_loss"]) / float(base[r["seed"]]["held_out_loss"]) - 1 for r in own]
        gap = round(100 * statistics.mean(gaps), 2) + 0.0  # no negative zero
        assert row["loss gap to fp32"] == f"{gap:+.2f} %", recipe
        fraction = float(base["0"]["bytes_per_step"]) / float(own[0]["bytes_per_step"])
        assert row["bytes, of fp32's"] == f"1/{round(fraction)}", recipe


def test_speeds_are_those_of_the_page_about_performance():
    page = (ROOT / "docs" / "performance.md").read_text()
    shown = table_after(README, "Measured speed")
    assert {"int8", "int4", "noop"} <= set(shown)
    for column, heading in {
        "100 Mbit/s": "100 Mbit/s",
        "1 Gbit/s": "1 Gbit/s",
        "loopback": "Loopback",
        "GPU": "GPU",
    }.items():
        measured = table_after(page, heading)
        for name, row in shown.items():
            own = measured.get("torch fp16" if name == "torch's fp16 hook" else name)
            assert row[column] == (own["DDP over it"] if own else "-"), (column, name)
