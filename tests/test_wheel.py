"""The wheel, installed into an empty environment elsewhere, does what the README promises."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import gradwire

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.full


def run(*words, cwd, timeout=600, **variables):
    env = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")
    }
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The programs of an environment that has the wheel, and what the wheel needs."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / "bin"
    (wheel,) = built.glob("*.whl")
    run(programs / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    return programs


def test_wheel_and_sdist_are_fit_for_an_index(built):
    files = sorted(built.iterdir())
    version = gradwire.__version__
    assert [file.name for file in files] == [
        f"gradwire-{version}-py3-none-any.whl",
        f"gradwire-{version}.tar.gz",
    ]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)
    with zipfile.ZipFile(files[0]) as opened:
        wheel = opened.namelist()
    with tarfile.open(files[1]) as opened:
        sdist = opened.getnames()
    assert {"gradwire/py.typed", "gradwire/report/draw.js"} <= set(wheel)
    assert {name.partition("/")[0] for name in wheel} == {"gradwire", f"gradwire-{version}.dist-info"}
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "tests/test_wheel.py", "docs/index.md"):
        assert f"gradwire-{version}/{name}" in sdist
    assert max(file.stat().st_size for file in files) < 2 << 20


def test_the_wheel_brings_no_tools_of_developers(installed, tmp_path):
    listed = run(installed / "python", "-m", "pip", "list", "--format", "freeze", cwd=tmp_path).lower()
    assert "torch==" in listed
    assert not re.search(r"^(pytest|mypy|ruff|sphinx|plotly|hypothesis)==", listed, re.MULTILINE)


def test_the_commands_answer(installed, tmp_path):
    assert "headroom" in run(installed / "gradwire", "--help", cwd=tmp_path)
    assert f"gradwire {gradwire.__version__}" in run(installed / "gradwire", "--version", cwd=tmp_path)
    assert "gradwire headroom" in run(installed / "gradwire", cwd=tmp_path)
    assert "problem" in run(installed / "gradwire", "doctor", cwd=tmp_path)


def test_the_readmes_example_trains_on_two_ranks(installed, tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(example)
    words = ("--standalone", "--nproc-per-node", "2", "train.py")
    shown = run(installed / "torchrun", *words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert shown.count("WireStats(num_steps=10, bytes_sent=") == 2


def test_the_quick_start_works_word_for_word(installed, tmp_path):
    page = (ROOT / "docs" / "quickstart.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    script, line = (text for language, text in blocks if language == "python")
    (tmp_path / "train.py").write_text(script)
    commands = [line for language, text in blocks if not language for line in text.splitlines()]
    assert len(commands) == 4
    _, summary = (text.strip() for language, text in blocks if language == "text")
    for command in commands:
        if command.split("#")[0].strip() == "gradwire headroom":
            continue  # takes a minute; see test_headroom_reaches_a_verdict
        program, *words = shlex.split(command, comments=True)
        shown = run(installed / program, *words, cwd=tmp_path, OMP_NUM_THREADS="1")
        told = "communication" if words[0] == "headroom" else summary
        assert told.lower() in shown.lower()
    plain = "model = nn.parallel.DistributedDataParallel(net)\n"
    assert plain in script
    (tmp_path / "train.py").write_text(script.replace(plain, line) + "print(wire.stats())\n")
    words = ("--standalone", "--nproc-per-node", "2", "train.py")
    shown = run(installed / "torchrun", *words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert shown.count("WireStats(num_steps=50, bytes_sent=") == 2


def test_headroom_reaches_a_verdict(installed, tmp_path):
    words = ("--steps", "8", "--recipe", "int8", "--html", "page.html")
    shown = run(installed / "gradwire", "headroom", *words, cwd=tmp_path)
    assert "int8" in shown
    assert "showFigure" in (tmp_path / "page.html").read_text()
    assert "communication" in shown.lower()
