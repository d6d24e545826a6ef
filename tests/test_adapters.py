"""The parts that adapters share, and what a user sees without the framework."""

import contextlib
import importlib
import importlib.util
import pickle
import random
import sys

import pytest
import torch

from gradwire.adapters.adapted_wire import AdaptedWire
from gradwire.adapters.figures import Figures
from gradwire.adapters.methods import AveragedGradients
from gradwire.adapters.state_files import StateFolder
from gradwire.scripts.imports import ImportNotice
from gradwire.telemetry import ParameterStats, WireStats


def write_all(folder, num_ranks):
    for rank in range(num_ranks):
        folder.write({"values": torch.full((2,), float(rank))}, rank, num_ranks)


def test_each_rank_reads_its_own_state(tmp_path):
    folder = StateFolder(str(tmp_path / "gradwire"), "a wire", step=7)
    assert folder.read(0, 2) is None
    write_all(folder, 2)
    for rank in range(2):
        (state,) = folder.read(rank, 2)
        assert state["values"].tolist() == [rank, rank]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_reads_all_states(tmp_path, num_ranks):
    folder = StateFolder(str(tmp_path), "a wire")
    write_all(folder, 2)
    for rank in range(num_ranks):
        assert [state["values"][0].item() for state in folder.read(rank, num_ranks)] == [0.0, 1.0]


def test_files_of_ranks_that_are_gone_are_removed(tmp_path):
    folder = StateFolder(str(tmp_path), "a wire")
    write_all(folder, 3)
    write_all(folder, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.pt", "rank1.pt"}
    folder.remove()
    folder.remove()
    assert not tmp_path.exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (StateFolder("", "local SGD", 7), "was saved by a wire, not by local SGD"),
        (StateFolder("", "a wire", 8), "is of step 7 and the checkpoint of step 8"),
    ],
)
def test_states_of_another_kind_or_step_are_refused(tmp_path, other, message):
    write_all(StateFolder(str(tmp_path), "a wire", 7), 1)
    with pytest.raises(ValueError, match=message) as caught:
        StateFolder(str(tmp_path), other.kind, other.step).read(0, 1)
    assert f"remove the folder {tmp_path}" in str(caught.value)


class Code:
    """An object whose pickle runs code when it is loaded."""

    def __reduce__(self):
        return exec, ("raise SystemExit",)


def refuse(folder):
    with pytest.raises(ValueError, match=r"rank\d.pt.*: restore it, or remove the folder") as caught:
        folder.read(0, 1)
    assert "weights_only" not in str(caught.value), "torch says how to run the code of a file"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_state_file_whose_bytes_were_changed_is_refused_by_its_name(tmp_path):
    folder, file = StateFolder(str(tmp_path), "a wire", 7), tmp_path / "rank0.pt"
    write_all(folder, 1)
    good, choice = file.read_bytes(), random.Random(0)
    head = good.index(b"PK", 4)  # the pickle comes first, and then what torch checks
    for _ in range(300):
        bad = bytearray(good)
        bad[choice.randrange(head)] ^= 1 << choice.randrange(8)
        file.write_bytes(bad)
        with contextlib.suppress(ValueError):  # some bytes do not matter
            folder.read(0, 1)
    for bad in (b"", b"nonsense", good[:100], pickle.dumps(Code())):
        file.write_bytes(bad)
        refuse(folder)


@pytest.mark.parametrize("name", ["format", "kind", "step", "rank", "world_size", "state"])
@pytest.mark.parametrize("value", [None, "x", 10**30, [], "missing"])
def test_a_state_file_with_other_fields_is_refused_by_its_name(tmp_path, name, value):
    folder, file = StateFolder(str(tmp_path), "a wire", 7), tmp_path / "rank0.pt"
    write_all(folder, 1)
    content = torch.load(file)
    content[name] = value
    if value == "missing":
        del content[name]
    torch.save(content, file)
    refuse(folder)


def test_states_may_lie_on_any_filesystem():
    folder = StateFolder("memory://bucket/epoch=1.ckpt.gradwire", "a wire")
    write_all(folder, 2)
    (state,) = folder.read(1, 2)
    assert state["values"].tolist() == [1.0, 1.0]
    folder.remove()
    assert folder.read(0, 2) is None


def test_figures_are_those_since_the_last_reading():
    figures = Figures()
    first = figures.read(WireStats(2, 100, 4, 0.5, 6.0, ()))
    assert (first["gradwire/bytes_sent"], first["gradwire/wait_ms"]) == (50, 0.25)
    parameters = (ParameterStats("weight", 2.0, 0.5, 0.9, 3.0),)
    second = figures.read(WireStats(4, 180, 8, 1.5, 7.0, (), num_skipped=1, parameters=parameters))
    assert (second["gradwire/bytes_sent"], second["gradwire/total_bytes_sent"]) == (40, 180)
    assert (second["gradwire/wait_ms"], second["gradwire/work_ms"]) == (0.5, 0.5)
    assert (second["gradwire/relative_error"], second["gradwire/skipped_steps"]) == (0.5, 1)
    on_cuda = Figures().read(WireStats(1, 80, 2, None, None, ()))
    assert not {"gradwire/wait_ms", "gradwire/wait_share"} & on_cuda.keys()


def test_a_wire_that_has_not_begun_says_so_and_saves_nothing(tmp_path):
    wire = AdaptedWire(AveragedGradients("int4"))
    with pytest.raises(RuntimeError, match="'stats' is not there yet"):
        wire.stats()
    wire.save(str(tmp_path / "gradwire"))
    assert wire.metrics() == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["lightning", "fabric", "accelerate", "transformers"])
def test_without_its_framework_an_adapter_says_what_to_install(name, monkeypatch):
    for module in [*sys.modules]:
        if module.partition(".")[0] in ("lightning", "accelerate", "transformers"):
            monkeypatch.delitem(sys.modules, module)
    for framework in ("lightning", "accelerate", "transformers"):
        monkeypatch.setitem(sys.modules, framework, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"gradwire.adapters.{name}", raising=False)
    extra = "lightning" if name == "fabric" else name
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'gradwire\[{extra}\]'"):
        importlib.import_module(f"gradwire.adapters.{name}")


def test_an_import_is_noticed_once_it_is_over(tmp_path, monkeypatch):
    (tmp_path / "noticed_module.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    notice = ImportNotice("noticed_module", lambda module: seen.append(module.value))
    notice.watch()
    assert importlib.util.find_spec("noticed_module") is not None
    assert seen == [], "a module that is only looked for is not imported"
    importlib.import_module("noticed_module")
    assert seen == [3]
    assert notice not in sys.meta_path
    ImportNotice("noticed_module", lambda module: seen.append(-module.value)).watch()
    assert seen == [3, -3]
