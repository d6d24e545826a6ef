"""Parameters that gradwire gathers on a lane: exact, ahead of their use, and with errors on all ranks."""

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.peers import gloo
from gradwire.sharded import gathers
from gradwire.sharded import weights as weights_module
from tests.sharded_runs import attached, batch, loss_of, make, same_bits, shard, train, world


def grown(rank, weights, steps, **options):
    """Return the parameters after some steps, in which a micro-batch comes before each step's own."""
    model = shard(make(num_blocks=3), **options)
    with gradwire.attach(model, "fp32", weights=weights):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            model.set_requires_gradient_sync(False)
            loss_of(model, batch(rank, step + 50)).backward()
            model.set_requires_gradient_sync(True)
            with torch.no_grad():
                loss_of(model, batch(rank, step + 70))
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def check_bits(rank, reshards):
    have = grown(rank, "fp32", range(3), reshard_after_forward=reshards)
    assert same_bits(have, grown(rank, None, range(3), reshard_after_forward=reshards))


@pytest.mark.parametrize("reshards", [True, pytest.param(False, marks=pytest.mark.full)])
def test_exact_gathers_have_the_bits_of_torchs(reshards, two_ranks):
    two_ranks.run(check_bits, reshards)


@pytest.mark.full
@pytest.mark.parametrize("reshards", [True, False])
def test_exact_gathers_of_three_ranks_have_the_bits_of_torchs(reshards, three_ranks):
    three_ranks.run(check_bits, reshards)


def check_replicas(rank):
    found = {}
    for spec in ("fp32", None):
        model, wire = attached("int4", True, weights=spec)
        found[spec] = train(model, range(3), rank)
        wire.detach()
    assert same_bits(found["fp32"], found[None])


def test_exact_gathers_within_replicas_have_the_bits_of_torchs(four_ranks):
    four_ranks.run(check_replicas)


def check_nodes(rank):
    """Two nodes of two ranks: the rows of both of a node's ranks go to the other node once."""
    peers, send = [], gloo._GlooMessages.send

    def noted(self, peer, row):
        if row.numel() > 100:
            peers.append(peer)
        send(self, peer, row)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        monkeypatch.setattr(gloo._GlooMessages, "send", noted)
        model = shard(make())
        exact = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        with gradwire.attach(model, "fp32", weights="fp32"):
            model.blocks[0].unshard()
    assert all(torch.equal(p, exact[f"blocks.0.{name}"]) for name, p in model.blocks[0].named_parameters())
    assert peers == [rank ^ 2, rank ^ 1, rank ^ 1]


def test_rows_enter_a_node_once(four_ranks):
    four_ranks.run(check_nodes)


def events_of(model, monkeypatch):
    """Return a list of the gathers that will begin and be used, and the blocks that will be computed."""
    events, start, use = [], gathers.Gathers.start, gathers.Gathers._use

    def noted(self, unit, *args):
        events.append(f"gather {unit.name}")
        return start(self, unit, *args)

    def noted_use(self, unit):
        events.append(f"use {unit.name}")
        use(self, unit)

    monkeypatch.setattr(gathers.Gathers, "start", noted)
    monkeypatch.setattr(gathers.Gathers, "_use", noted_use)
    for name, module in model.named_modules():
        if name.startswith("blocks.") and name.count(".") == 1:
            module.up.register_forward_pre_hook(lambda *_, name=name: events.append(f"forward {name}"))
    return events


def check_order(rank):
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = shard(make())
        events = events_of(model, monkeypatch)
        with gradwire.attach(model, "fp32", weights="fp32"):
            loss_of(model, batch(rank, 0)).backward()
            learned, backward = events[:8], events[8:]
            events.clear()
            loss_of(model, batch(rank, 1))
    root, *blocks = (
        [f"gather {name}", f"use {name}", f"forward {name}"] for name in ("", "blocks.0", "blocks.1")
    )
    assert learned == [*root[:2], *blocks[0], *blocks[1]]
    assert backward == ["gather blocks.1", "use blocks.1", "gather blocks.0", "use blocks.0"]
    (gather_root, use_root, _), (gather_0, *compute_0), (gather_1, *compute_1) = root, *blocks
    assert events == [gather_root, gather_0, use_root, gather_1, *compute_0, *compute_1]


def test_a_unit_is_gathered_while_those_before_it_are_gathered_and_computed(two_ranks):
    two_ranks.run(check_order)


class Skipping(torch.nn.Module):
    """A block that can be left out."""

    def __init__(self, block):
        super().__init__()
        self.inner, self.is_used = block, True

    def forward(self, x):
        return self.inner(x) if self.is_used else x


def check_left_out(rank):
    """Parameters that were gathered in vain are gathered again after they have changed."""
    found = []
    for spec in ("fp32", None):
        model = shard(make(num_blocks=3))
        model.blocks = torch.nn.ModuleList(map(Skipping, model.blocks))
        with gradwire.attach(model, "fp32", weights=spec), torch.no_grad():
            outputs = [model(batch(rank, 0))]
            for is_used in (True, False, True):
                model.blocks[1].is_used = is_used
                outputs.append(model(batch(rank, 1)))
                for p in model.parameters():
                    p.mul_(0.5)
        found.append(torch.stack(outputs))
    assert torch.equal(*found)


def test_a_block_that_is_left_out_once_is_not_stale_later(two_ranks):
    two_ranks.run(check_left_out)


def stop(*_):
    raise KeyError("bad input")


def check_broken_off(rank):
    """Train with a pass without gradients before backward(), and one that breaks off before a step."""
    found = []
    for spec in ("fp32", None):
        model = shard(make(num_blocks=4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with gradwire.attach(model, "fp32", weights=spec):
            for step in range(3):
                optimizer.zero_grad()
                loss = loss_of(model, batch(rank, step))
                with torch.no_grad():
                    model(batch(rank, step))
                (loss + loss_of(model, batch(rank, step + 3))).backward()
                hook = model.blocks[0].register_forward_pre_hook(stop)
                with pytest.raises(KeyError, match="bad input"):
                    model(batch(rank, step))
                hook.remove()
                model.reshard()
                model.blocks[0].reshard()
                optimizer.step()
            found.append(model(batch(rank, 6)))
    assert torch.equal(*found)


def test_parameters_are_not_stale_after_a_forward_pass_that_breaks_off(two_ranks):
    two_ranks.run(check_broken_off)


def check_failure(rank):
    """An error of one rank is raised on all; after detach torch gathers what they have now."""
    model = shard(make())
    wire = gradwire.attach(model, "int8", weights="int8")
    loss_of(model, batch(rank, 0)).backward()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 1:
            monkeypatch.setattr(weights_module, "_encode", lambda *_: 1 / 0)
        with pytest.raises(gradwire.WireError, match="rank 1, step 1, .*weights=int8: ZeroDivisionError"):
            loss_of(model, batch(rank, 1))
    with pytest.raises(gradwire.WireError, match="ZeroDivisionError"):
        loss_of(model, batch(rank, 1))
    assert "ZeroDivisionError" in str(wire.failure)
    wire.detach()
    model.reset_iter_state()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    plain = make()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(0.5)
    torch.testing.assert_close(model(batch(rank, 1)), plain(batch(rank, 1)))
    dist.barrier()


def test_an_error_while_parameters_are_gathered_is_raised_on_every_rank(two_ranks):
    two_ranks.run(check_failure)


def check_difference(rank):
    model = shard(make())
    with gradwire.attach(model, "fp32", weights="fp32"):
        with pytest.raises(gradwire.WireError, match="do not agree: gathered is 'blocks.0'"):
            model.blocks[rank % 2].unshard()
        dist.barrier()


def test_ranks_that_gather_different_units_raise(two_ranks):
    two_ranks.run(check_difference)


def check_plan(rank):
    model = shard(make())
    with gradwire.attach(model, "fp32", weights="fp32") as wire:
        loss_of(model, batch(rank, 0)).backward()
        exact = wire.plan()
    with gradwire.attach(model, "fp32") as wire:
        loss_of(model, batch(rank, 0)).backward()
        assert wire.plan() == exact
    # The root's parameters are gathered once, those of blocks twice; each rank sends its half of them.
    blocks = sum(p.numel() for p in model.blocks.parameters())
    shapes = [p.shape for name, p in model.named_parameters() if "blocks" not in name]
    rest = sum(-(-shape[0] // world()) * shape[1:].numel() for shape in shapes)
    assert exact.bytes_gathered == 4 * (rest + 2 * blocks // world())


def test_the_plan_counts_bytes_of_exact_gathers(two_ranks):
    two_ranks.run(check_plan)
