"""The figures and events of a wire while it runs."""

import json
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile

import gradwire
from tests.models import backward, small_model


class Writer:
    """A stand-in with the methods of TensorBoard's writer."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars[tag, global_step] = scalar_value


class BrokenWriter:
    num_calls = 0

    def add_scalar(self, tag, scalar_value, global_step):
        self.num_calls += 1
        raise OSError("no space left")


class BytesPath:
    def __fspath__(self):
        return b"wire.jsonl"


def events_of(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def check_figures(rank, folder):
    plain, model, writer = small_model(), small_model(), Writer() if rank == 0 else None
    telemetry = gradwire.Telemetry(every=3, jsonl=folder / "wire.jsonl", writer=writer)
    unobserved = small_model()
    with (
        gradwire.attach(model, "int4", telemetry=telemetry) as wire,
        gradwire.attach(unobserved, "int4") as silent,
    ):
        for step in range(5):
            for each in (plain, model, unobserved):
                backward(each, step)
            for (name, p), q, r in zip(
                model.module.named_parameters(), unobserved.parameters(), plain.parameters(), strict=True
            ):
                assert torch.equal(p.grad, q.grad), "looking changes nothing"
                found = {each.name: each for each in wire.stats().parameters}[name]
                if step % 3 == 0:
                    error = (p.grad - r.grad).norm() / r.grad.norm()
                    assert found.relative_error == pytest.approx(error.item(), rel=1e-4, abs=1e-6), name
                    cosine = torch.cosine_similarity(p.grad.flatten(), r.grad.flatten(), 0)
                    assert found.cosine == pytest.approx(cosine.item(), abs=1e-4)
                    assert found.gradient_norm == pytest.approx(r.grad.norm().item(), rel=1e-4)
                    (memory,) = wire.state_dict()["memory"].values()
                    held = memory["residual:float32"][name].norm()
                    assert found.residual_norm == pytest.approx(held.item(), rel=1e-4, abs=1e-9)
        # Comparing sends more, which is no figure of the recipe's.
        assert wire.stats().bytes_sent == silent.stats().bytes_sent
        assert silent.stats().parameters == ()
        wire.swap("bf16")
        backward(model, 6)
    if rank == 0:
        told = events_of(folder / "wire.jsonl")
        assert [(event["event"], event["step"]) for event in told] == [
            ("attach", 0),
            ("step", 0),
            ("rebuild", 1),
            ("step", 3),
            ("swap", 5),
            ("detach", 6),
        ]
        assert (told[4]["before"], told[4]["recipe"]) == ("int4", "bf16")
        last = told[3]
        assert last["bytes_sent"] == sum(each.bytes_sent for each in silent.stats().steps[3].buckets)
        assert writer.scalars["gradwire/bytes_sent", 3] == last["bytes_sent"]
        for name, own in last["parameters"].items():
            assert writer.scalars[f"gradwire/cosine/{name}", 3] == own["cosine"]
        assert 0 < last["relative_error"] < 1
        total = math.hypot(*(own["residual_norm"] for own in last["parameters"].values()))
        assert last["residual_norm"] == pytest.approx(total)


def test_figures_are_those_of_the_gradients(two_ranks, tmp_path):
    two_ranks.run(check_figures, tmp_path)


def check_figures_of_a_hook(rank):
    model, writer = small_model(), Writer()
    telemetry = gradwire.Telemetry(every=1, writer=writer, errors=False)
    with gradwire.attach(model, torch_hooks.allreduce_hook, state=dist.group.WORLD, telemetry=telemetry):
        backward(model)
    assert not any("bytes_sent" in tag or "num_messages" in tag for tag, _ in writer.scalars)


def test_what_a_hook_sends_is_not_known_rather_than_nothing(two_ranks):
    two_ranks.run(check_figures_of_a_hook)


def check_events(rank, folder):
    model = small_model()
    every_rank = gradwire.Telemetry(every=2, jsonl=f"{folder}/rank{{rank}}.jsonl", errors=False)
    with gradwire.attach(model, "int4", telemetry=every_rank, on_nonfinite="skip") as wire:
        backward(model, 0)
        model.zero_grad()
        (model(torch.randn(4, 10)).sum() * (float("nan") if rank else 1.0)).backward()
        state = wire.state_dict()
        wire.load_state_dict(state)
        assert wire.stats().parameters == (), "errors were not asked for"
    told = events_of(folder / f"rank{rank}.jsonl")
    assert [event["event"] for event in told] == ["attach", "step", "rebuild", "skip", "load", "detach"]
    assert all(event["rank"] == rank for event in told)
    assert told[3]["num_skipped"] == 1


def test_events_are_those_that_happened(two_ranks, tmp_path):
    two_ranks.run(check_events, tmp_path)


def attached_ranks(folder):
    """Return the ranks of the wires that wrote to each file of a folder, in the order of their attaching."""
    files = {path.name: events_of(path) for path in folder.iterdir()}
    return {
        name: [event["rank"] for event in told if event["event"] == "attach"] for name, told in files.items()
    }


def check_halves(rank, folder):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name in ("wire.jsonl", "each-{rank}.jsonl"):
        model = small_model(process_group=halves[rank // 2])
        telemetry = gradwire.Telemetry(every=1, jsonl=folder / name, errors=False)
        with gradwire.attach(model, "int8", telemetry=telemetry):
            backward(model)
            backward(model)


def test_models_on_other_ranks_of_the_world_have_other_files(four_ranks, tmp_path):
    four_ranks.run(check_halves, tmp_path)
    each = {f"each-{rank}.jsonl": [rank] for rank in range(4)}
    assert attached_ranks(tmp_path) == {"wire.jsonl": [0], "wire-rank2.jsonl": [2], **each}
    for path in tmp_path.iterdir():
        events = [event["event"] for event in events_of(path)]
        assert events == ["attach", "step", "rebuild", "step", "detach"], path.name


def check_two_models(rank, folder, has_group):
    groups = [dist.group.WORLD, dist.new_group([0, 1]) if has_group else dist.group.WORLD]
    models = [small_model(process_group=group) for group in groups]
    for name in ("wire.jsonl", "each-{rank}.jsonl"):
        telemetry = gradwire.Telemetry(every=1, jsonl=folder / name, errors=False)
        wires = [gradwire.attach(model, "int8", telemetry=telemetry) for model in models]
        for model, num_steps in zip(models, (1, 2), strict=True):
            for step in range(num_steps):
                backward(model, step)
        for wire in wires:
            wire.detach()
    # A model that comes after another goes on in its file.
    gradwire.attach(models[0], "int8", telemetry=gradwire.Telemetry(jsonl=folder / "wire.jsonl")).detach()


@pytest.mark.parametrize("has_group", [True, False], ids=["two groups", "one group"])
def test_two_models_of_one_process_have_different_files(has_group, two_ranks, tmp_path):
    two_ranks.run(check_two_models, tmp_path, has_group)
    each = {f"each-{rank}{model}.jsonl": [rank] for rank in range(2) for model in ("", "-model2")}
    assert attached_ranks(tmp_path) == {"wire.jsonl": [0, 0], "wire-model2.jsonl": [0], **each}
    for name, num_steps in (("wire", 1), ("wire-model2", 2), ("each-1", 1), ("each-1-model2", 2)):
        told = events_of(tmp_path / f"{name}.jsonl")
        assert sum(event["event"] == "step" for event in told) == num_steps, name


def check_sites(rank, folder, store_file):
    """Each rank is a site of its own. Sites are numbered backwards by a group that torch's world has not."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("site", "shard"))
    sites = gradwire.make_group(dist.FileStore(str(store_file), 2), 1 - rank, 2)
    for name, replicas in (("world", mesh["site"]), ("made", sites)):
        model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh["shard"])
        telemetry = gradwire.Telemetry(jsonl=folder / f"{name}-{{rank}}.jsonl", errors=False)
        gradwire.attach(model, "int8", replicas=replicas, telemetry=telemetry).detach()
        number = rank if name == "world" else 1 - rank
        assert [event["rank"] for event in events_of(folder / f"{name}-{number}.jsonl")] == [number] * 2


def test_sites_that_share_no_world_are_told_apart_by_their_numbers(two_ranks, tmp_path):
    (tmp_path / "events").mkdir()
    two_ranks.run(check_sites, tmp_path / "events", tmp_path / "store")
    assert len(attached_ranks(tmp_path / "events")) == 4


def check_pipe(rank, path):
    models = [small_model(), small_model()]
    telemetry = gradwire.Telemetry(jsonl=path)
    with (
        gradwire.attach(models[0], "int8", telemetry=telemetry),
        gradwire.attach(models[1], "int8", telemetry=telemetry),
    ):
        pass


def test_two_models_share_a_pipe(two_ranks, tmp_path):
    read_end, write_end = os.pipe()
    try:
        two_ranks.run(check_pipe, f"/proc/{os.getpid()}/fd/{write_end}")
        lines = os.read(read_end, 1 << 16).splitlines()
    finally:
        os.close(read_end)
        os.close(write_end)
    assert [json.loads(line)["event"] for line in lines] == ["attach", "attach", "detach", "detach"]


def failing(state, bucket):
    raise KeyError("broken")


def check_failure(rank, folder):
    model = small_model()
    every_rank = gradwire.Telemetry(every=2, jsonl=f"{folder}/rank{{rank}}.jsonl", errors=False)
    with gradwire.attach(model, failing, telemetry=every_rank):
        for _ in range(2):
            with pytest.raises(gradwire.WireError, match="broken"):
                backward(model)
    told = events_of(folder / f"rank{rank}.jsonl")
    assert [event["event"] for event in told] == ["attach", "failure", "detach"], "once"
    assert ", step 0, bucket 0, hook" in told[1]["text"]


def test_a_failure_is_told_once(two_ranks, tmp_path):
    two_ranks.run(check_failure, tmp_path)


def check_nan(rank, folder):
    model = small_model()
    with gradwire.attach(model, "int4", telemetry=gradwire.Telemetry(jsonl=folder / "nan.jsonl")) as wire:
        (model(torch.randn(4, 10)).sum() * float("nan")).backward()
        assert all(each.relative_error is None for each in wire.stats().parameters)
    if rank == 0:
        assert events_of(folder / "nan.jsonl")[1]["parameters"]["0.weight"]["cosine"] is None


def test_figures_of_a_gradient_that_is_not_finite_are_unknown_and_no_nan_is_written(two_ranks, tmp_path):
    two_ranks.run(check_nan, tmp_path)


def check_full_disk(rank, jsonl):
    model, writer = small_model(), None if jsonl else BrokenWriter()
    telemetry = gradwire.Telemetry(every=1, jsonl=jsonl, writer=writer if rank == 0 else None)
    with gradwire.attach(model, "int4", telemetry=telemetry) as wire:
        for step in range(3):
            backward(model, step)
        assert wire.failure is None
    assert writer is None or writer.num_calls == (rank == 0), "once is enough"


@pytest.mark.parametrize("jsonl", ["/dev/full", None], ids=["a file", "a writer"])
def test_a_full_disk_ends_telemetry_and_not_the_run(jsonl, two_ranks):
    two_ranks.run(check_full_disk, jsonl)


def check_refusals(rank, folder):
    model = small_model()
    with pytest.raises((OSError, RuntimeError), match="No such file"):
        gradwire.attach(model, "int4", telemetry=gradwire.Telemetry(jsonl=folder / "nowhere" / "a"))
    with pytest.raises(ValueError, match="telemetry of errors is .*every 5 steps on rank"):
        gradwire.attach(model, "int4", telemetry=gradwire.Telemetry(every=5) if rank else None)
    with pytest.raises(TypeError, match="must be a gradwire.Telemetry, not str"):
        gradwire.attach(model, "int4", telemetry="wire.jsonl")


def test_telemetry_that_cannot_work_on_all_ranks_is_refused(two_ranks, tmp_path):
    two_ranks.run(check_refusals, tmp_path)


def check_profile(rank, spec):
    model = small_model()
    with gradwire.attach(model, spec) as wire:
        backward(model, 0)
        for _ in range(5):  # each ends right after its last bucket
            with profile() as seen:
                backward(model, 1)
                backward(model, 2)
        names = [event.name for event in seen.events() if event.name.startswith("gradwire::")]
        assert sorted(names) == sorted(2 * [f"gradwire::{spec} bucket {b.index}" for b in wire.layout()])


@pytest.mark.parametrize("spec", ["int4", "powersgd:rank=1"])
def test_a_profile_has_a_range_for_each_bucket(spec, two_ranks):
    two_ranks.run(check_profile, spec)


def check_profile_of_a_hook(rank):
    model, hook = small_model(), torch_hooks.allreduce_hook
    with gradwire.attach(model, hook, state=dist.group.WORLD), profile() as seen:
        backward(model, 0)
    assert any(event.name.endswith("allreduce_hook bucket 0") for event in seen.events())


def test_a_profile_has_a_range_for_a_hook(two_ranks):
    two_ranks.run(check_profile_of_a_hook)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"every": 0}, ValueError, "every 1 or more steps"),
        ({"every": 2.5}, TypeError, "a number of steps, not 2.5"),
        ({"every": "events.jsonl"}, TypeError, "not 'events.jsonl'; a file is given as jsonl="),
        ({"jsonl": 3}, TypeError, "name of a file, not int"),
        ({"jsonl": BytesPath()}, TypeError, "name of a file, not bytes"),
        ({"jsonl": ""}, ValueError, "name of a file, not an empty text"),
        ({"writer": object()}, TypeError, "no add_scalar"),
    ],
)
def test_telemetry_that_cannot_be_is_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        gradwire.Telemetry(**options)
