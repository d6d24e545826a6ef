"""Headroom: records, the verdict on them, the table, and the command on real ranks."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import gradwire
from gradwire.cli import app
from gradwire.headroom import (
    Machine,
    ModelFactory,
    Record,
    Row,
    Workload,
    give_verdict,
    measure_steps,
    read_records,
    step_table,
    write_records,
)

TINY = ["--width", "32", "--layers", "1", "--sequence", "4", "--steps", "4"]


def record(world_size=2, num_samples=24, **step_ms):
    """A record whose rows vary by 1 % around the given step times."""
    rows = [
        Row(name, tuple(ms * (1 + 0.001 * (i % 11 - 5)) for i in range(num_samples)), 1_000_000)
        for name, ms in step_ms.items()
    ]
    return Record(
        gradwire_version="0.1.0",
        torch_version="2.13.0",
        date="2025-01-02T03:04:05+00:00",
        machine=Machine("A CPU", 2, "Linux"),
        world_size=world_size,
        threads_per_rank=1,
        backend="gloo",
        device="cpu",
        link=None,
        one_machine=True,
        interleaved=True,
        bucket_mb=None,
        workload=str(Workload()),
        gradient_bytes=4 * Workload().num_parameters,
        rows=tuple(rows),
    )


def noisy(fast, slow, num_fast, num_samples=24):
    """Samples of which the first few are fast."""
    return tuple(fast if i < num_fast else slow for i in range(num_samples))


def with_samples(old, **samples):
    rows = [dataclasses.replace(row, samples_ms=samples.get(row.recipe, row.samples_ms)) for row in old.rows]
    return dataclasses.replace(old, rows=tuple(rows))


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


# --- the workload ---


@pytest.mark.parametrize(
    "workload",
    [
        Workload(width=32, num_layers=2),
        Workload(width=8, num_layers=1),
        Workload("resnet", width=5, num_layers=3, sequence=4),
    ],
)
def test_a_workload_knows_how_many_parameters_it_has(workload):
    assert workload.num_parameters == sum(p.numel() for p in workload.model().parameters())
    built = workload.build()
    assert built.step_loss(built.model).shape == ()


def test_a_workload_that_cannot_be_built_is_refused():
    with pytest.raises(ValueError, match=r"the width must be a multiple of 8, .* not 20"):
        Workload(width=20)
    with pytest.raises(ValueError, match="num_layers must be at least 1, not 0"):
        Workload(num_layers=0)
    with pytest.raises(ValueError, match="the workloads are 'transformer' and 'resnet', not 'mlp'"):
        Workload("mlp")


def two_inputs():
    model = torch.nn.Bilinear(3, 4, 5)
    return model, (torch.randn(2, 3), torch.randn(2, 4)), lambda output: output.sum()


def named_inputs():
    model, (a, b), loss = two_inputs()
    return model, {"input1": a, "input2": b}, loss


def no_loss():
    return two_inputs()[:2]


@pytest.mark.parametrize("name", ["two_inputs", "named_inputs"])
def test_a_models_batch_is_one_argument_several_or_named_ones(name):
    built = ModelFactory(f"{__name__}:{name}").build()
    assert built.step_loss(built.model).shape == ()


def test_a_factory_that_cannot_be_used_is_explained():
    with pytest.raises(ValueError, match=r"package.module:factory, not 'train'"):
        ModelFactory("train")
    with pytest.raises(ValueError, match="cannot import no_such_module:make"):
        ModelFactory("no_such_module:make")
    with pytest.raises(TypeError, match="must return a model, a batch and a loss function, not tuple of 2"):
        ModelFactory(f"{__name__}:no_loss").build()


# --- records ---


def test_a_record_comes_back_from_json_as_it_was():
    before = record(allreduce=100, bf16=80, noop=70)
    unknown_bytes = dataclasses.replace(before.rows[1], bytes_per_step=None)
    details = dataclasses.replace(unknown_bytes, bucket_mb=8.0, num_messages=4, wait_ms=1.5, work_ms=2.0)
    before = dataclasses.replace(before, link="1gbit", rows=(*before.rows, details))
    assert Record.from_json(before.to_json()) == before


def test_json_has_the_figures_a_reader_wants():
    row = json.loads(record(allreduce=100, noop=70).to_json())["rows"][0]
    assert row["recipe"] == "allreduce"
    assert row["step_ms"] == pytest.approx(100, rel=0.01)
    assert row["spread_ms"][0] < row["step_ms"] < row["spread_ms"][1]


def change(key, value):
    return lambda data: data.update({key: value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("schema_version", 99), "schema version 99, and this gradwire reads version 2"),
        (lambda data: data.pop("schema_version"), "'schema_version' is missing"),
        (lambda data: data.pop("world_size"), "'world_size' is missing"),
        (change("world_size", "two"), "'world_size' must be int, not \"two\""),
        (change("world_size", True), "'world_size' must be int, not true"),
        (change("world_size", 0), "world size must be at least 1"),
        (change("machine", None), "'machine' must be dict, not null"),
        (change("rows", []), "needs one row 'allreduce'"),
        (change("rows", [3]), "an object with 'samples_ms' was expected, not 3"),
        (lambda data: data["rows"].pop(), "needs one row 'noop'"),
        (lambda data: data["rows"][0].update(samples_ms=["1"]), "must be a list of numbers"),
        (lambda data: data["rows"][0].update(samples_ms=[]), "'allreduce' has no samples"),
        (lambda data: data["rows"][0].update(samples_ms=[0]), "not a positive number"),
        (lambda data: data["rows"][0].update(samples_ms=[1.0]), "different numbers of samples"),
        (lambda data: data["rows"].append(data["rows"][0]), "needs one row 'allreduce'"),
    ],
)
def test_a_damaged_record_says_what_is_wrong(damage, message):
    data = json.loads(record(allreduce=100, noop=70).to_json())
    damage(data)
    with pytest.raises(ValueError, match=message):
        Record.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "no json"])
def test_what_is_no_record_is_refused(text):
    with pytest.raises(ValueError, match="not a headroom record: "):
        Record.from_json(text)


# --- the verdict ---


def test_a_bottleneck_is_named_with_its_size_and_the_best_recipe():
    said = give_verdict(record(allreduce=100, fp32=98, bf16=80, noop=50))
    assert "50% of a plain DDP step on 2 ranks" in said
    assert "2.00x as fast, which is the most" in said
    assert "bf16, the best measured, makes it 1.25x as fast: use it: gradwire.attach(model, 'bf16')." in said


def test_without_recipes_the_verdict_is_about_communication_alone():
    assert give_verdict(record(allreduce=100, noop=50)).endswith("the most any recipe could gain.")


def test_nothing_is_to_be_gained_where_communication_is_cheap():
    said = give_verdict(record(allreduce=100, bf16=99, noop=97))
    assert "3% of a plain DDP step" in said
    assert "more than 1.03x" in said
    assert "nothing to gain" in said


def test_communication_that_seems_to_save_time_costs_nothing():
    said = give_verdict(record(allreduce=100, bf16=99, noop=103))
    assert "takes 0% of a plain DDP step" in said
    assert "more than 1.00x" in said


def test_a_small_gain_is_called_small():
    said = give_verdict(record(allreduce=100, bf16=97, noop=50))
    assert "1.03x as fast: less than 5%, so compression is not worth it" in said


def test_recipes_that_slow_a_step_down_gain_nothing():
    said = give_verdict(record(allreduce=100, fp32=125, bf16=105, noop=50))
    assert "bf16, the best measured, makes it 0.95x as fast: nothing gains anything" in said


def test_a_gain_that_chance_could_give_is_called_noise():
    steady = record(allreduce=100, bf16=80, noop=50)
    said = give_verdict(with_samples(steady, bf16=noisy(80, 120, num_fast=14)))
    assert "1.25x as fast, but that may be noise: it was faster in 14 of 24 taken side by side" in said
    said = give_verdict(with_samples(steady, bf16=noisy(80, 120, num_fast=22)))
    assert "1.25x as fast: use it" in said


def test_a_bottleneck_that_chance_could_give_is_called_noise():
    steady = record(allreduce=100, bf16=80, noop=50)
    said = give_verdict(with_samples(steady, noop=noisy(50, 120, num_fast=14)))
    assert "50% of a plain DDP step" in said
    assert "may be noise: without it a step was faster in 14 of 24 taken side by side" in said


def test_a_few_steps_show_nothing():
    assert "may be noise" in give_verdict(record(num_samples=3, allreduce=100, bf16=80, noop=50))


def small(name, ms):
    """A row of buckets of 8 MB."""
    (row,) = [row for row in record(**{"allreduce": 1, "noop": 1, name: ms}).rows if row.recipe == name]
    return dataclasses.replace(row, bucket_mb=8.0)


def test_smaller_buckets_are_recommended_where_they_are_best():
    plain = record(allreduce=100, bf16=90, noop=50)
    said = give_verdict(dataclasses.replace(plain, rows=(*plain.rows, small("bf16", 60))))
    assert "bf16 with buckets of 8 MB, the best measured, makes it 1.67x as fast: use it" in said
    assert "bucket_cap_mb=8" in said
    said = give_verdict(dataclasses.replace(plain, rows=(*plain.rows, small("allreduce", 80))))
    assert "plain DDP with buckets of 8 MB, the best measured, makes it 1.25x as fast: use that" in said
    said = give_verdict(
        dataclasses.replace(plain, rows=(*plain.rows, small("allreduce", 80), small("bf16", 60)))
    )
    assert said.endswith("Plain DDP with buckets of 8 MB alone makes it 1.25x as fast.")


def test_the_link_is_part_of_the_verdict():
    slow = dataclasses.replace(record(allreduce=100, bf16=80, noop=50), link="100mbit")
    assert "on 2 ranks with links of 100mbit" in give_verdict(slow)


def test_a_step_is_compute_exposed_communication_and_overhead():
    whole = record(allreduce=100, bf16=80, noop=50)
    bf16 = dataclasses.replace(whole.rows[1], wait_ms=20.0, work_ms=10.0)
    parts = dataclasses.replace(whole, rows=(whole.rows[0], bf16, whole.rows[2]))
    assert parts.split_ms(bf16) == pytest.approx((50, 20, 10), rel=0.02)
    assert parts.split_ms(parts.allreduce) == pytest.approx((50, 50, 0), rel=0.02)
    assert parts.split_ms(parts.noop) == pytest.approx((50, 0, 0), rel=0.02)


def test_a_sweep_is_a_list_of_records():
    records = [record(allreduce=100, noop=ms) for ms in (60, 70)]
    assert read_records(write_records(records)) == records
    with pytest.raises(ValueError, match="this file has 2 records"):
        Record.from_json(write_records(records))


def test_many_steps_are_no_trouble():
    assert "1.25x as fast: use it" in give_verdict(record(num_samples=2000, allreduce=100, bf16=80, noop=50))


def test_one_rank_has_nothing_to_gain():
    assert "nothing to gain" in give_verdict(record(world_size=1, allreduce=100, bf16=80, noop=50))


# --- the table ---


def text_of(table):
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_table_shows_every_row_and_the_conditions():
    shown = record(world_size=4, allreduce=100, fp32=98, bf16=80, noop=50)
    lines = text_of(step_table(shown)).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["allreduce"][1:] == ["100.0", "99.5-100.4", "1.0", "MB", "1.00x", "50%"]
    assert rows["bf16"][1:] == ["80.0", "79.6-80.3", "1.0", "MB", "1.25x", "38%"]
    assert rows["noop"][-2:] == ["2.00x", "-"]
    assert "fp32" in rows
    text = " ".join(" ".join(lines).split())  # captions wrap at the table's width
    assert "4 ranks over gloo: transformer, 18.9M parameters, batch 2 x 64" in text
    assert "A CPU, 2 cores" in text
    assert "4 threads share 2 cores" in text
    assert "what a ring sends" in text


def test_unknown_bytes_are_called_unknown():
    shown = record(allreduce=100, noop=50)
    hidden = tuple(dataclasses.replace(row, bytes_per_step=None) for row in shown.rows)
    assert "unknown" in text_of(step_table(dataclasses.replace(shown, rows=hidden)))


# --- the command ---


def test_the_command_measures_and_writes_what_it_shows(tmp_path):
    path = tmp_path / "record.json"
    result = run("headroom", *TINY, "--bucket-mb", "0.01", "--json", str(path))
    assert result.exit_code == 0, result.output
    measured = Record.from_json(path.read_text())
    communicating = [name for name in gradwire.RECIPES if name != "noop"]
    assert [row.recipe for row in measured.rows] == ["allreduce", *communicating, "noop"]
    assert measured.workload == str(Workload(width=32, num_layers=1, sequence=4))
    assert measured.gradient_bytes == 4 * Workload(width=32, num_layers=1).num_parameters
    assert (measured.world_size, measured.threads_per_rank, measured.backend) == (2, 1, "gloo")
    assert measured.bucket_mb == 0.01
    assert {len(row.samples_ms) for row in measured.rows} == {4}
    sent = {row.recipe: row.bytes_per_step for row in measured.rows}
    assert sent["allreduce"] == measured.gradient_bytes
    assert sent["fp32"] == pytest.approx(sent["allreduce"], rel=0.05)
    assert sent["bf16"] == pytest.approx(sent["fp32"] / 2, rel=0.02)
    assert sent["noop"] == 0
    error = {row.recipe: row.gradient_error for row in measured.rows}
    assert error["fp32"] < 1e-6 < error["bf16"] < 1e-2
    assert all(row.num_messages for row in measured.recipes)
    assert all(row.recipe in result.stdout for row in measured.rows)
    assert give_verdict(measured) == " ".join(result.stdout.split("\n\n")[-1].split())


def test_json_on_stdout_stands_alone():
    result = run("headroom", *TINY, "--ranks", "1", "--recipe", "bf16", "--recipe", "noop", "--json", "-")
    assert result.exit_code == 0, result.output
    measured = Record.from_json(result.stdout)
    assert [row.recipe for row in measured.rows] == ["allreduce", "bf16", "noop"]
    assert {row.bytes_per_step for row in measured.rows} == {0}
    assert "1 rank over gloo" in result.stderr
    assert "nothing to gain" in result.stderr


def test_quiet_prints_the_verdict_alone():
    result = run("headroom", *TINY, "--ranks", "1", "--recipe", "fp16:reduction=sum", "--quiet")
    assert result.exit_code == 0, result.output
    assert " ".join(result.stdout.split()).startswith("One rank has nobody to average with")
    assert not result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "bf61"], "there is no recipe 'bf61'; did you mean 'bf16' or 'fp16'?"),
        (["--recipe", "fp16:reduction=max"], "option 'reduction' must be mean or sum, not 'max'"),
        (["--width", "20"], "multiple of 8"),
        (["--bucket-mb", "0"], "--bucket-mb must be above 0"),
        (["--json", "no-such-folder/record.json"], "cannot write no-such-folder/record.json"),
        (["--ranks", "0"], "--ranks"),
        (["--link", "fast"], "such as 100mbit"),
        (["--model", "train"], "package.module:factory"),
        (["--device", "tpu"], "the device is cpu or cuda, not 'tpu'"),
        (["--", "no-such-script.py"], "there is no script no-such-script.py"),
    ],
)
def test_wrong_arguments_end_with_2_before_anything_runs(arguments, message):
    result = run("headroom", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


def test_a_failed_measurement_ends_with_1_and_the_ranks_errors(monkeypatch):
    monkeypatch.setattr("gradwire.cli.headroom.measure_steps", fail_on_ranks)
    result = run("headroom", *TINY)
    assert result.exit_code == 1
    assert "the measurement failed: 1 of 1 ranks" in result.stderr
    assert "the memory is full" in result.stderr


def fail_on_ranks(*arguments, **options):
    from gradwire.testing import run_ranks

    return run_ranks(run_out_of_memory, 1)


def run_out_of_memory(rank):
    raise MemoryError("the memory is full")


def test_progress_counts_up_to_the_end():
    seen = []
    workload = Workload(width=8, num_layers=1, sequence=2)
    measured = measure_steps(["bf16"], 1, workload, num_steps=4, on_progress=lambda *step: seen.append(step))
    assert [row.recipe for row in measured.rows] == ["allreduce", "bf16", "noop"]
    assert seen == sorted(seen)
    assert seen[-1] == (21, 21)  # three rows, three steps to warm up and four timed


def test_measuring_nothing_is_refused():
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        measure_steps([], 1, Workload(), num_steps=0)


def test_recipes_are_listed_with_what_they_do():
    result = run("recipes")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in gradwire.RECIPES)
    assert "bf16 on the wire; sums in fp32." in result.stdout


def test_version_and_help():
    assert f"gradwire {gradwire.__version__}" in run("--version").stdout
    helped = run("headroom", "--help").stdout
    assert "gradwire headroom --link 100mbit,1gbit" in helped
    assert "Exit codes: 0" in helped


SCRIPT = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(300, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    model(torch.randn(3, 300)).square().mean().backward()
    optimizer.step()
print("the script's own end")
"""


def test_a_script_that_ends_too_early_is_explained(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run("headroom", "--steps", "8", "--", str(tmp_path / "train.py"), "5")
    assert result.exit_code == 1
    assert "ended after 4 optimizer steps with allreduce; 11 are needed" in result.stderr


def torchrun(folder, *arguments):
    """The record that rank 0 of two writes, and what was printed."""
    path = folder / "record.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--recipe", "bf16", "--steps", "8", "--json", str(path)]
    done = subprocess.run(
        [*command, "-m", "gradwire", "headroom", *options, *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return Record.from_json(path.read_text()), done.stdout


def test_torchrun_gives_the_ranks_it_has(tmp_path):
    measured, shown = torchrun(tmp_path, "--width", "32", "--layers", "1", "--sequence", "4")
    assert shown.count("2 ranks over gloo") == 1
    assert [row.recipe for row in measured.rows] == ["allreduce", "bf16", "noop"]
    assert (measured.world_size, measured.one_machine, measured.interleaved) == (2, True, True)
    assert measured.rows[1].bytes_per_step == pytest.approx(measured.gradient_bytes / 2, rel=0.01)


def test_a_script_is_measured_as_it_is_and_ended_at_the_same_step(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    measured, shown = torchrun(tmp_path, "--", "train.py", "100000")
    assert "Rows ran one after the other" in shown
    assert "the script's own end" not in shown
    assert [row.recipe for row in measured.rows] == ["allreduce", "bf16", "noop"]
    assert {len(row.samples_ms) for row in measured.rows} == {8}
    assert measured.gradient_bytes == 4 * 15050
    assert [row.bytes_per_step for row in measured.rows] == [4 * 15050, 2 * 15050, 0]
    assert (measured.world_size, measured.backend, measured.interleaved) == (2, "gloo", False)
