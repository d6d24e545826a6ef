"""Models that a script shards: a recipe is attached to each of them, as a whole."""

import json

import pytest
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.headroom.script_rank import _totals
from gradwire.scripts import Observations, summarize
from gradwire.sharded import attach_to_all
from tests.sharded_runs import (
    batch,
    exact_gradients,
    full_gradients,
    loss_of,
    make,
    mesh_of,
    require_near,
    require_within,
    world,
)

INT8_ERROR = 1.01 / 254  # of one rounding, relative to the largest gradient


def check_every_model(rank):
    """Models that a script shards get the recipe at their first forward pass, once, as wholes."""
    import torch.distributed.fsdp

    with attach_to_all("int8") as attachments:
        model = make()
        for block in model.blocks:
            torch.distributed.fsdp.fully_shard(block)
        torch.distributed.fsdp.fully_shard(model)
        for step in range(2):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            require_within(model, make(), step, INT8_ERROR)
        assert len(attachments.made) == 1
        assert attachments.made[0].wire.stats().num_steps == 2
        assert "saved" in summarize(attachments, Observations())
    with attach_to_all("powersgd") as attachments:
        model = torch.distributed.fsdp.fully_shard(make())
        loss_of(model, batch(rank, 0)).backward()
        require_near(full_gradients(model), exact_gradients(make(), 0, world()), 1e-4)
        assert attachments.num_refused == 1
        assert "1 model left to torch" in summarize(attachments, Observations())
    assert torch.distributed.fsdp.fully_shard is fully_shard


def test_models_that_a_script_shards_are_attached_to(two_ranks):
    two_ranks.run(check_every_model)


def check_telemetry(rank, path):
    """`gradwire run --telemetry` records what there is: shards have no errors of whole gradients."""
    import torch.distributed.fsdp

    with attach_to_all("int8", telemetry=gradwire.Telemetry(every=1, jsonl=path)) as attachments:
        model = torch.distributed.fsdp.fully_shard(make())
        loss_of(model, batch(rank, 0)).backward()
        (made,) = attachments.made
        made.wire.detach()
    if rank == 0:
        events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
        assert events == ["attach", "step", "detach"]


def test_telemetry_of_a_script_that_shards_has_no_errors(two_ranks, tmp_path):
    two_ranks.run(check_telemetry, tmp_path / "wire.jsonl")


def check_totals(rank, kind):
    """What `gradwire headroom` knows of a script's models: their sharding, and what torch has to send."""
    import torch.distributed.fsdp

    with attach_to_all("int8") as attachments:
        mesh = mesh_of(2, 2) if kind == "hsdp" else None
        model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(40, 24), mesh=mesh)
        model(torch.ones(2, 40)).sum().backward()
        totals = _totals(attachments)
        attachments.made[0].wire.detach()
    num_bytes = 4 * (40 * 24 + 24)
    assert (totals.sharding, totals.num_parameters, totals.gradient_bytes) == (kind, 984, num_bytes)
    assert totals.num_layers == 2, "a weight and a bias"
    assert totals.exact_bytes == num_bytes // 2, "half of the gradients; or twice half of half of them"


def test_a_script_that_shards_over_all_ranks_is_compared_with_torchs_reduce_scatter(two_ranks):
    two_ranks.run(check_totals, "fsdp")


def test_a_script_that_has_replicas_is_compared_with_torchs_average_of_them(four_ranks):
    four_ranks.run(check_totals, "hsdp")


def check_parts_sharded_together(rank):
    """Parts of a model that one call shards, as Accelerate does with its embeddings and last layers."""
    import torch.distributed.fsdp

    with attach_to_all("int8") as attachments:
        model = make()
        torch.distributed.fsdp.fully_shard([model.blocks[0], model.blocks[1]])
        torch.distributed.fsdp.fully_shard(model)
        for step in range(2):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            require_within(model, make(), step, INT8_ERROR)
        assert [each.wire.stats().num_steps for each in attachments.made] == [2]
        attachments.made[0].wire.detach()
    with pytest.raises(ValueError, match="outside of it; attach to the model that has both"):
        gradwire.attach(model.blocks[0], "int8")


def test_parts_that_one_call_shards_are_attached_to_with_the_whole(two_ranks):
    two_ranks.run(check_parts_sharded_together)
