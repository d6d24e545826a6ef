"""The example that trains a language model, and the benchmark that compares recipes with it."""

import contextlib
import csv
import dataclasses
import importlib
import io
import operator
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.testing import run_ranks

ROOT = Path(__file__).parent.parent
TINY = ["--steps", "6", "--width", "32", "--layers", "1", "--length", "16", "--batch", "1", "--workers", "8"]


@pytest.fixture(scope="module")
def convergence():
    """Return the benchmark's module, which runs on one thread."""
    num_threads, path = torch.get_num_threads(), list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("convergence")
    sys.path[:] = path
    torch.set_num_threads(num_threads)


@pytest.fixture
def benchmark(convergence):
    return lambda *arguments: convergence.main([*map(str, arguments)])


@pytest.fixture(scope="module")
def folder(convergence, tmp_path_factory):
    out = tmp_path_factory.mktemp("convergence")
    assert convergence.main([*TINY, "--out", str(out), "--seeds", "0", "--recipes", "fp32", "int8"]) == 0
    return out


EXAMPLE = ROOT / "examples" / "train_lm.py"


def job_example(rank, options):
    """Run the example on a rank that has a process group; return what it prints. Keeps every checkpoint."""
    dist.init_process_group = dist.destroy_process_group = shutil.rmtree = lambda *args: None
    sys.argv, sys.path = [str(EXAMPLE), *options], [str(EXAMPLE.parent), *sys.path]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def launch_example(options):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE]
    done = subprocess.run([*launch, *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(printed):
    """Return the held-out loss, the MB sent, and the step since which they are counted."""
    found = re.search(r"held-out loss (\S+) nats a byte, (\S+) MB sent by a rank since step (\d+)", printed)
    return [float(figure) for figure in found.groups()]


@pytest.mark.full
def test_the_example_goes_on_from_its_checkpoint_as_if_it_had_not_been_ended(tmp_path):
    folder, aside = tmp_path / "run", tmp_path / "aside"
    options = ["--recipe", "schedule(0=int8:feedback=true; 8=powersgd)", "--every", "6", "--width", "32"]
    options += ["--layers", "1", "--batch", "2", "--checkpoint", str(folder), "--steps", "12"]
    loss, sent_mb, first = figures(run_ranks(job_example, 2, args=(options,))[0])
    assert first == 0
    # Of 33504 values, each of two ranks sends one half twice, in 8 bits for 8 steps and in fewer for 4.
    assert 8 * 33504 / 1e6 < sent_mb < 12.2 * 33504 / 1e6
    (folder / "step00000012").rename(aside)
    (folder / "new").mkdir()
    (folder / "new" / "rank0.pt").write_bytes(b"half of a")  # as a rank leaves it that is killed here
    later_loss, later_sent_mb, first = figures(launch_example(options))
    assert (later_loss, first) == (loss, 6)
    assert later_sent_mb < sent_mb
    assert [path.name for path in folder.iterdir()] == ["step00000012"], "the old one is gone"
    for name in ("rank0.pt", "rank1.pt"):
        require_same(torch.load(folder / "step00000012" / name), torch.load(aside / name))
    residuals = torch.load(aside / "rank1.pt")["wire"]["memory"]["rank1"]["residual:float32"]
    assert all(residual.any() for residual in residuals.values()), "what was held back is saved"
    further_loss, _, first = figures(run_ranks(job_example, 3, args=([*options[:-1], "24"],))[0])
    assert first == 12, "and on another number of ranks"
    assert further_loss < loss
    assert len(EXAMPLE.read_text().splitlines()) < 150


def require_same(have, want):
    """Check that every tensor and number is the same."""
    if isinstance(want, dict):
        assert have.keys() == want.keys()
        for key in want:
            require_same(have[key], want[key])
    else:
        assert (torch.equal if isinstance(want, torch.Tensor) else operator.eq)(have, want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--accumulate", "0"], "argument --accumulate: must be a number of at least 1, not '0'"),
        (["--every", "often"], "argument --every: must be a number of at least 1, not 'often'"),
    ],
)
def test_the_example_refuses_numbers_that_would_train_nothing(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options])
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert message in capsys.readouterr().err


def test_a_row_that_is_there_is_not_run_again_and_one_that_is_not_is_added(benchmark, folder, capsys):
    before = (folder / "small.csv").read_text()
    assert benchmark(*TINY, "--out", folder, "--seeds", 0, "--recipes", "fp32", "int8") == 0
    assert (folder / "small.csv").read_text() == before
    assert benchmark(*TINY, "--out", folder, "--seeds", 0, 1, 1, "--recipes", "fp32", "fp32") == 0
    assert "all 2 rows are in" in capsys.readouterr().out
    rows = list(csv.DictReader((folder / "small.csv").open()))
    assert [(row["recipe"], row["seed"]) for row in rows] == [("fp32", "0"), ("int8", "0"), ("fp32", "1")]
    assert rows[0]["curve"].split()[0] == rows[1]["curve"].split()[0], "both start with the same weights"


def test_a_convolutional_network_learns_from_images_that_are_made(benchmark, tmp_path, capsys):
    shape = ["--steps", 8, "--width", 8, "--layers", 1, "--length", 12, "--batch", 16, "--workers", 2]
    options = ["--setting", "vision", *shape, "--out", tmp_path, "--seeds", 0]
    assert benchmark(*options, "--recipes", "fp32", "powersgd:rank=1", "LocalSGD:period=4") == 0
    fp32, low_rank, local = csv.DictReader((tmp_path / "vision.csv").open())
    assert fp32["data"] == "images"
    for row in (fp32, low_rank, local):
        assert float(row["held_out_loss"]) < float(row["curve"].split()[0].partition("=")[2])
    assert float(low_rank["bytes_per_step"]) < 0.7 * float(fp32["bytes_per_step"])
    capsys.readouterr()
    assert benchmark("--table", tmp_path / "vision.csv") == 0
    assert "2 workers x 16 images of 12 x 12, 8 steps" in capsys.readouterr().out


def test_workers_of_local_sgd_start_alike_and_average_every_period(benchmark, tmp_path):
    two = [*TINY[:-1], 2]
    assert benchmark(*two, "--out", tmp_path, "--seeds", 0, "--recipes", "fp32", "LocalSGD:period=3") == 0
    fp32, local = csv.DictReader((tmp_path / "small.csv").open())
    assert local["recipe"] == "LocalSGD:period=3"
    assert local["curve"].split()[0] == fp32["curve"].split()[0], "both start with the same weights"
    assert float(local["bytes_per_step"]) == float(fp32["bytes_per_step"]) / 3
    assert float(local["held_out_loss"]) < float(local["curve"].split()[0].partition("=")[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipes", "fp99"], "there is no recipe 'fp99'"),
        (["--recipes", "int4:blok=64"], "recipe 'int4' has no option 'blok'"),
        (["--recipes", "route(*.bias=noop; *=int8)"], "leaves every rank its own gradients"),
        (["--recipes", "DiLoCo:period=often"], "DiLoCo:period=often has no valid period"),
        (["--recipes", "DiLoCo:period=4,rate=1"], "DiLoCo has no option 'rate'; put recipe= last"),
        (["--recipes", "topk:momentum=0.9"], "applies the momentum of SGD itself: give --optimizer sgd"),
        (["--steps", 0], "steps must be at least 1, not 0"),
        (["--steps", 7], "small.csv has rows of another setting, 8 workers x 1 x 16 bytes, 6 steps"),
        (["--table", "none.csv"], "there is no file none.csv"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(benchmark, folder, options, message, capsys):
    before = (folder / "small.csv").read_text()
    with pytest.raises(SystemExit, match="2"):
        benchmark(*TINY, "--out", folder, *options)
    assert message in capsys.readouterr().err
    assert (folder / "small.csv").read_text() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-150], "line 3, is no row of a run"),
        (lambda text: text.replace(",seed,", ",sed,"), "line 2, is no row of a run: KeyError('seed')"),
        (lambda text: text.replace("Python 3", "Python 2"), "another standard library to train on"),
    ],
)
def test_rows_are_not_added_to_a_file_that_they_do_not_fit(
    benchmark, folder, tmp_path, change, message, capsys
):
    first_rows = (folder / "small.csv").read_text().splitlines(keepends=True)[:3]
    changed = change("".join(first_rows))
    (tmp_path / "small.csv").write_text(changed)
    with pytest.raises(SystemExit, match="2"):
        benchmark(*TINY, "--out", tmp_path, "--seeds", 5, "--recipes", "fp32")
    assert message in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "small.csv").read_text() == changed


def test_a_row_that_another_process_trains_is_left_to_it(benchmark, convergence, folder, tmp_path, capsys):
    (tmp_path / "small.csv").write_text((folder / "small.csv").read_text())
    options = [*TINY, "--out", tmp_path, "--seeds", 4, "--recipes", "fp32"]
    setting = convergence.read(tmp_path / "small.csv")[0].setting
    with convergence.Row(setting, "fp32", 4, tmp_path).claimed():
        assert benchmark(*options) == 3
    assert "fp32, seed 4 is trained by another process" in capsys.readouterr().out
    assert benchmark(*options) == 0, "which ended without a row"
    assert [path.name for path in tmp_path.iterdir()] == ["small.csv"], "nothing is left"


def test_each_optimizer_has_a_file_of_its_own_and_no_table_mixes_them(benchmark, folder, tmp_path, capsys):
    options = [*TINY, "--out", tmp_path, "--seeds", 0, "--recipes", "fp32"]
    assert benchmark(*options, "--optimizer", "sgd") == 0
    (sgd,) = csv.DictReader((tmp_path / "small-sgd.csv").open())
    adamw, *_ = csv.DictReader((folder / "small.csv").open())
    assert (sgd["optimizer"], adamw["optimizer"]) == ("sgd", "adamw")
    begun = sgd["curve"].split()[0]
    assert begun == adamw["curve"].split()[0], "both start with the same weights"
    assert sgd["held_out_loss"] != adamw["held_out_loss"], "and go different ways"
    assert float(sgd["held_out_loss"]) < float(begun.partition("=")[2])
    capsys.readouterr()
    assert benchmark("--table", tmp_path / "small-sgd.csv") == 0
    assert "6 steps, SGD with lr 0.1, 1 layers" in capsys.readouterr().out
    both = tmp_path / "both.csv"
    own_rows = (tmp_path / "small-sgd.csv").read_text().splitlines()[1:]
    both.write_text("\n".join([*(folder / "small.csv").read_text().splitlines(), *own_rows]))
    with pytest.raises(SystemExit, match="2"):
        benchmark("--table", both)
    assert "all runs must have one setting, but these have 2" in capsys.readouterr().err


def test_sgd_has_no_momentum_where_the_recipe_applies_one(convergence):
    optimizers, parameters = importlib.import_module("optimizers"), [torch.nn.Parameter(torch.zeros(1))]
    for spec, momentum in (("topk", 0.9), ("topk:momentum=0.9", 0.0)):
        optimizer = optimizers.make_optimizer("sgd", parameters, gradwire.recipe(spec))
        assert [group["momentum"] for group in optimizer.param_groups] == [momentum]


def test_a_file_older_than_the_column_of_optimizers_is_read_and_added_to(benchmark, folder, tmp_path):
    old = tmp_path / "small.csv"
    with old.open("w", newline="") as file:
        new_rows = list(csv.DictReader((folder / "small.csv").open()))
        writer = csv.DictWriter(file, [n for n in new_rows[0] if n != "optimizer"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(new_rows)
    old.write_text(old.read_text().rstrip())  # as some editors leave it
    assert benchmark(*TINY, "--out", tmp_path, "--seeds", 0, 2, "--recipes", "fp32") == 0
    rows = list(csv.DictReader(old.open()))
    assert "optimizer" not in rows[0]
    assert [(row["recipe"], row["seed"]) for row in rows if row["seed"] != "1"] == [
        ("fp32", "0"),
        ("int8", "0"),
        ("fp32", "2"),
    ]
    assert all(None not in row and row["versions"].startswith("torch") for row in rows), "all columns fit"


@pytest.mark.full
def test_a_run_that_is_ended_goes_on_where_it_was_with_the_same_bits(
    benchmark, convergence, tmp_path, monkeypatch, capsys
):
    recipes = ["int4", "powersgd:rank=1", "DiLoCo:period=4,fragments=2,delay=1,recipe=int4"]
    options = [*TINY, "--seeds", 0, "--recipes", *recipes, "--out"]
    assert benchmark(*options, tmp_path / "whole") == 0
    pieces, times = [*options, tmp_path / "pieces"], iter(range(10_000))
    monkeypatch.setattr(convergence.time, "monotonic", lambda: next(times))  # a second for each look
    codes = []
    while not codes or codes[-1] == 3:
        codes.append(benchmark(*pieces, "--minutes", 5 / 60))
        said = " ".join(capsys.readouterr().out.split())
        assert (codes[-1] == 3) == bool(re.search(r"is saved after \d of 6 steps: run this again", said))
    assert len(codes) >= 4, "each row was ended on its way"
    whole, parts = (
        list(csv.DictReader((tmp_path / name / "small.csv").open())) for name in ("whole", "pieces")
    )
    for one, other in zip(whole, parts, strict=True):
        assert {**one, "seconds": ""} == {**other, "seconds": ""}
    assert [path.name for path in (tmp_path / "pieces").iterdir()] == ["small.csv"], "nothing is left"


def test_the_table_and_the_plot_show_every_recipe(benchmark, folder, tmp_path, capsys):
    plot = tmp_path / "curves.svg"
    assert benchmark("--table", folder / "small.csv", "--plot", folder / "small.csv", plot) == 0
    said = capsys.readouterr().out
    assert re.search(r"\| `int8` \| .* \| 4\.0x \| .* \| [+-]\d\.\d\d % \(.*\) \| 1 \|", said)
    assert plot.read_text().count("<polyline") == 3 * 2
    assert benchmark("--recipes", "int8", "--plot", folder / "small.csv", plot) == 0
    assert plot.read_text().count("<polyline") == 3
    assert "fp32" not in plot.read_text()
    with pytest.raises(SystemExit, match="2"):
        benchmark("--recipes", "int5", "--plot", folder / "small.csv", plot)
    assert "no runs of int5" in capsys.readouterr().err


def test_a_run_that_diverged_and_one_of_a_single_step_are_drawn(benchmark, folder, tmp_path):
    diverged, plot = tmp_path / "small.csv", tmp_path / "curves.svg"
    rows = (folder / "small.csv").read_text()
    diverged.write_text(re.sub(r"(int8,0,.* 4=)\S+ 5=\S+ 6=\S+(?=,)", r"\g<1>inf 5=nan 6=nan", rows))
    assert "nan" in diverged.read_text()
    assert benchmark("--plot", diverged, plot) == 0
    assert plot.read_text().count("<polyline") == 3 * 2
    assert "nan" not in plot.read_text()
    diverged.write_text(re.sub(r"(?m)(0=\S+ 1=\S+) 2=.*?(?=,)", r"\1", rows))
    assert benchmark("--recipes", "int8", "--plot", diverged, plot) == 0
    assert plot.read_text().count("<polyline") == 3


def test_where_fp32_rises_again_the_lowest_loss_is_shown_too(benchmark, folder, tmp_path, capsys):
    rising = tmp_path / "small.csv"
    rising.write_text((folder / "small.csv").read_text())
    assert benchmark("--table", rising) == 0
    assert "lowest on the way" not in capsys.readouterr().out
    rising.write_text(re.sub(r"(fp32,0,.*,0=)[\d.]+", r"\g<1>0.5", rising.read_text()))
    assert benchmark("--table", rising) == 0
    said = capsys.readouterr().out
    assert "| held-out loss | gap to fp32 | lowest on the way | gap to fp32 | seeds |" in said
    assert "(0.5000 to " in said


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("fidelity-*.csv")), ids=lambda path: path.stem)
def test_the_page_of_details_shows_the_table_of_the_runs_beside_it(benchmark, path, capsys):
    assert benchmark("--table", path) == 0
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "fidelity-details.md").read_text()


@pytest.fixture
def front(convergence):
    return importlib.import_module("front")


def test_the_front_has_the_points_that_no_other_beats(front):
    figures = {
        "a": (4.0, [0.1]),
        "b": (8.0, [0.5, 0.7]),
        "c": (7.0, [0.9]),
        "d": (16.0, [3.0]),
        "e": (16.0, [4.0]),
    }
    points = [front.Point(name, fewer, gaps) for name, (fewer, gaps) in figures.items()]
    assert [point.label for point in front.front_of(points)] == ["a", "b", "d"]


def test_rows_of_an_outer_loop_that_differ_in_what_is_tuned_are_one_point(front, convergence):
    run = convergence.read(ROOT / "docs" / "fidelity-real.csv")[0]
    assert run.recipe == "fp32"
    losses = {"fp32": 1.0, "DiLoCo:period=40,momentum=0.8": 1.03, "DiLoCo:period=40,lr=0.5,inner=0.1": 1.02}
    runs = [dataclasses.replace(run, recipe=name, curve={2000: loss}) for name, loss in losses.items()]
    fp32, outer = front.points_of(runs)
    assert (outer.label, outer.is_outer, fp32.is_outer) == ("DiLoCo 40, fp32", True, False)
    assert outer.gaps == [pytest.approx(2.0)]


def test_a_gap_is_to_fp32_in_the_same_setting_and_of_lowest_losses_where_it_overfits(front, convergence):
    first, *_ = convergence.read(ROOT / "docs" / "fidelity-real.csv")
    longer = dataclasses.replace(first.setting, steps=8000)

    def run(recipe, setting, *losses):
        return dataclasses.replace(first, recipe=recipe, setting=setting, curve=dict(enumerate(losses)))

    short = [run("fp32", first.setting, 4.0, 2.0), run("int8", first.setting, 4.0, 2.2)]
    long = [run("fp32", longer, 1.0, 1.5), run("int8", longer, 1.05, 1.2)]
    by_setting = front.settings_of([*long, *short, run("int8", longer, 9.0)])
    assert list(by_setting) == [first.setting, longer]
    gaps = [front.points_of(own)[1].gaps for own in by_setting.values()]
    assert gaps == [[pytest.approx(10.0)], [pytest.approx(5.0)]], "what comes again counts once"
    other = dataclasses.replace(longer, width=7)
    with pytest.raises(ValueError, match="steps and workers alone, but these have 2 settings"):
        front.settings_of([*short, run("fp32", other, 1.0)])
    with pytest.raises(ValueError, match="no runs of fp32 to compare with, of .* 8000 steps"):
        front.points_of(long[1:])


def test_runs_of_several_lengths_are_drawn_with_a_mark_for_each_and_a_label_for_a_recipe(
    benchmark, folder, tmp_path, capsys
):
    drawing, longer = tmp_path / "front.svg", tmp_path / "longer.csv"
    assert benchmark("--front", folder / "small.csv", drawing) == 0
    assert drawing.read_text().count('class="point"') == 2
    longer.write_text((folder / "small.csv").read_text().replace(",8,6,", ",8,60,"))
    assert benchmark("--front", folder / "small.csv", longer, folder / "small.csv", drawing) == 0
    drawn = drawing.read_text()
    assert drawn.count('class="point"') == 4
    assert [drawn.count(f">{words}<") for words in ("int8", "6 steps", "60 steps")] == [1, 1, 1]
    with pytest.raises(SystemExit):
        benchmark("--front", drawing)
    assert "--front needs a CSV file" in capsys.readouterr().err


def test_the_page_has_the_front_of_the_runs_beside_it(benchmark, tmp_path):
    (files,) = re.findall(r"--front (./docs/\S+ docs/\S+\.svg)", (ROOT / "docs" / "fidelity.md").read_text())
    expanded = subprocess.run(["bash", "-c", f"echo {files}"], capture_output=True, text=True, check=True)
    *sources, drawing = [ROOT / name for name in expanded.stdout.split()]
    assert benchmark("--front", *sources, tmp_path / "front.svg") == 0
    assert (tmp_path / "front.svg").read_text() == drawing.read_text(), "draw it again, as the page says"
