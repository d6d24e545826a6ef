"""The notebook runs from top to bottom, trains, and reaches a verdict."""

import json
import sys
import types
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


@pytest.mark.full
def test_the_notebook_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "clear the outputs before you commit"
    shown = []
    display = types.SimpleNamespace(HTML=str, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    (picture,) = shown
    measured = {name for name, _ in names["rows"]}  # some also with smaller buckets, so rows may be more
    assert measured == {"allreduce", "int8", "int4", "noop"}
    assert picture.count("<tr>") == len(names["rows"])
    assert names["record"]["verdict"]
    printed = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in printed.splitlines() if "loss " in line]
    assert len(losses) == 2
    assert losses[1] < 2 * losses[0] < 64  # an untrained model has 64
    assert "gradwire int8: 60 steps" in printed
