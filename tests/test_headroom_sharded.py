"""`gradwire headroom --sharding`: rows, figures and the verdict of sharded models."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.headroom import give_verdict, read_records, recommend, write_records
from gradwire.report import render_page
from tests.records import record

TINY = ["--width", "32", "--layers", "2", "--sequence", "4", "--steps", "2", "--quiet", "--json", "-"]


def run(*arguments):
    return CliRunner().invoke(app, ["headroom", *arguments])


def measured(*arguments):
    result = run(*TINY, *arguments)
    assert result.exit_code == 0, result.output
    (found,) = read_records(result.stdout)
    return found


def test_the_rows_are_torchs_own_sharding_recipes_and_two_limits():
    found = measured("--sharding", "fsdp", "--recipe", "fp32", "--recipe", "int8")
    rows = {row.recipe: row for row in found.rows}
    assert list(rows) == ["allreduce", "fp32", "int8", "noop", "alone"]
    assert found.sharding == "fsdp"
    assert rows["fp32"].bytes_per_step == pytest.approx(found.gradient_bytes / 2, rel=0.02)
    assert rows["allreduce"].bytes_per_step == found.gradient_bytes // 2
    assert rows["int8"].bytes_per_step == pytest.approx(found.gradient_bytes / 8, rel=0.05)
    assert (
        rows["fp32"].gradient_error < 1e-6 < rows["int8"].gradient_error < 0.02 < rows["noop"].gradient_error
    )
    assert rows["noop"].bytes_per_step == rows["alone"].bytes_per_step == 0


@pytest.mark.full
def test_replicas_are_measured_between_hosts():
    found = measured("--sharding", "hsdp", "--ranks", "4", "--recipe", "powersgd:rank=2")
    rows = {row.recipe: row for row in found.rows}
    assert list(rows) == ["allreduce", "powersgd:rank=2", "noop", "alone"]
    assert rows["allreduce"].bytes_per_step == found.gradient_bytes // 2
    assert 0 < rows["powersgd:rank=2"].bytes_per_step < found.gradient_bytes / 4
    assert found.sharding == "hsdp"


def sharded(kind, **step_ms):
    return replace(record(**step_ms), sharding=kind)


def test_the_verdict_says_what_recipes_can_and_cannot_shorten():
    said = give_verdict(sharded("fsdp", allreduce=100, int8=70, noop=60, alone=35))
    assert said.startswith("The reduce-scatter of gradients takes 40% of a plain FSDP2 step on 2 ranks;")
    assert "Another 25% are all-gathers of parameters, which no recipe shortens; attach(..., weights=" in said
    assert "int8, the best measured, makes it 1.43x as fast: use it: gradwire.attach(model, 'int8')" in said
    said = give_verdict(sharded("hsdp", allreduce=100, int8=99, noop=98, alone=50))
    assert "the average between replicas is not the bottleneck here" in said
    assert "Another 48% are gathers and reductions within replicas" in said


def test_an_outer_loop_is_named_for_a_sharded_model_that_has_replicas():
    slow = {"allreduce": 1000, "int8": 500, "noop": 10, "alone": 5}
    assert "LocalSGD" in give_verdict(record(**{k: v for k, v in slow.items() if k != "alone"}))
    assert "LocalSGD" not in give_verdict(sharded("fsdp", **slow))
    said = give_verdict(sharded("hsdp", **slow))
    outer = "outer=gradwire.DiLoCo(fragments=4, delay=4)"
    assert f"gradwire.LocalSGD(model, optimizer, period=16, {outer}), in int4" in said
    assert "A model without a mesh of two dimensions needs sites= too." in said


def test_ranks_that_train_alone_are_never_recommended():
    found = sharded("fsdp", allreduce=100, int8=70, noop=60, alone=10)
    assert recommend(found).recipe == "int8"
    assert [row.recipe for row in found.recipes] == ["int8"]


def test_a_record_keeps_its_sharding_and_earlier_records_have_none():
    found = sharded("hsdp", allreduce=100, int8=70, noop=60, alone=35)
    text = write_records([found])
    assert read_records(text) == [found]
    (earlier,) = read_records(write_records([record(allreduce=2, noop=1)]).replace('"sharding": null,', ""))
    assert earlier.sharding is None
    with pytest.raises(ValueError, match="must be fsdp or hsdp"):
        replace(found, sharding="zero")
    assert "alone" in render_page([found])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sharding", "zero"], "must be fsdp or hsdp, not 'zero'"),
        (["--shards", "2"], "--shards goes with --sharding hsdp"),
        (
            ["--sharding", "fsdp", "--shards", "1"],
            "fsdp shards over all ranks, 2 here, and not over 1: use hsdp",
        ),
        (["--sharding", "hsdp", "--ranks", "3", "--shards", "2"], "3 ranks cannot be replicas of 2 shards"),
        (["--sharding", "fsdp", "--recipe", "powersgd"], "whole matrices"),
        (["--sharding", "fsdp", "--bucket-mb", "1"], "leave them out"),
        (["--sharding", "fsdp", "--", __file__], "a script makes its own models"),
    ],
)
def test_wrong_arguments_end_with_2_before_anything_runs(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
