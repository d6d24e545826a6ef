"""Local SGD over sites: each trains a sharded model, and shards are averaged between sites."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.local_runs import saved_bytes
from tests.sharded_runs import same_bits
from tests.site_runs import (
    assert_sites_same,
    check_bits,
    loss_of,
    make,
    make_whole,
    net,
    sharded,
    train,
    whole,
)

pytestmark = pytest.mark.full  # tests/test_hsdp.py and tests/test_members.py have a part of this

STREAMING = gradwire.DiLoCo(fragments=2, delay=2)
ENDLESS = {"period": 6, "warmup_steps": 1, "recipe": "int4", "outer": STREAMING}  # int4 has residuals

# --- what sharding changes, and what it does not ---


@pytest.mark.parametrize(
    ("recipe", "outer", "native"),
    [
        ("fp32", gradwire.DiLoCo(fragments=3, delay=1), False),
        ("fp32", gradwire.SlowMo(), True),
        ("fp32", None, False),
    ],
)
def test_shards_are_averaged_to_the_bits_of_whole_models(recipe, outer, native, four_ranks):
    four_ranks.run(check_bits, recipe, outer, native)


def check_training(rank, recipe):
    """A site of two ranks trains as one rank with both batches does."""
    site = rank // 2
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    options = {
        "period": 3,
        "warmup_steps": 2,
        "recipe": recipe,
        "gradient_recipe": "fp32",
        "outer": STREAMING,
    }
    model, optimizer, local = make(**options)
    reference, reference_optimizer, expected = make_whole(groups, rank, **options)
    start = whole(model)
    with local, expected:
        ended = train(model, optimizer, local, rank, range(9))
        for step in range(9):
            reference_optimizer.zero_grad()
            sum(loss_of(reference, 2 * site + each, step) / 2 for each in range(2)).backward()
            reference_optimizer.step()
            assert expected.step() == (step + 1 in ended)
        bound = 1e-5 if recipe == "fp32" else 0.3
        for name, want in whole(reference).items():
            moved = (want - start[name]).abs().max()
            assert (whole(model)[name] - want).abs().max() <= bound * moved, name
        assert local.stats().bytes_sent > 0
        local.average()
        assert_sites_same(model)


@pytest.mark.parametrize(
    "recipe",
    ["fp32", "int4", "powersgd:rank=2", "topk"],
)
def test_a_site_trains_as_one_rank_with_all_its_batches(recipe, four_ranks):
    four_ranks.run(check_training, recipe)


def check_evaluations(rank):
    """A forward pass alone leaves gathered parameters behind, which an average must not miss."""
    model, optimizer, local = make(period=2)
    with local:
        train(model, optimizer, local, rank, range(1))
        with torch.no_grad():
            loss_of(model, 0, 0)
        local.average()
        with torch.no_grad():
            mine = loss_of(model, 0, 0)
        everyone = [torch.zeros(()) for _ in range(4)]
        dist.all_gather(everyone, mine)
        assert len(set(map(float, everyone))) == 1


def test_an_evaluation_before_an_average_does_no_harm(four_ranks):
    four_ranks.run(check_evaluations)


# --- states ---


def check_resumes(rank, native, recipe):
    options = {**ENDLESS, "recipe": recipe}
    for saved_after in (1, 5, 6):  # in the warm-up, in an averaging, after one
        model, optimizer, local = make(native, **options)
        with local:
            train(model, optimizer, local, rank, range(saved_after))
            saved = saved_bytes(model.state_dict(), optimizer.state_dict(), local.state_dict())
            assert bool(saved[2]["mean"]) == (saved_after == 5)
            train(model, optimizer, local, rank, range(saved_after, 12))
        resumed, resumed_optimizer, local = make(native, **options)
        with local:
            train(resumed, resumed_optimizer, local, rank, range(5))  # has a delay of its own to forget
            resumed.load_state_dict(saved[0])
            resumed_optimizer.load_state_dict(saved[1])
            local.load_state_dict(saved[2])
            train(resumed, resumed_optimizer, local, rank, range(saved_after, 12))
            assert same_bits(whole(model), whole(resumed)), saved_after


# A rotation mixes values with the padding of a shard, which no state holds.
@pytest.mark.parametrize(("native", "recipe"), [(False, "int4"), (True, "int4"), (False, "int2")])
def test_sharded_sites_resume_bit_for_bit_in_the_middle_of_a_delay(native, recipe, four_ranks):
    four_ranks.run(check_resumes, native, recipe)


def held_back(state):
    """Return the residuals of all ranks of a gathered state, by parameter."""
    found = {}
    for states in state["averaging"]["memory"].values():
        for key, own in states.items():
            for name, tensor in own.items() if key.startswith("residual") else ():
                found.setdefault(name, []).append(tensor.float())
    return found


def check_other_numbers(rank, grid):
    """Two sites of two ranks save together, and other numbers of sites and of shards go on with that."""
    model, optimizer, local = make(**ENDLESS)
    with local:
        train(model, optimizer, local, rank, range(5))
        own = local.state_dict()
        state = local.state_dict(gather=True)
        shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: t.shape for name, t in state["start"].items()} == shapes
    assert state["mean"], "saved in an averaging"
    assert all(
        not hasattr(t, "to_local") for kind in ("start", "momentum", "mean") for t in state[kind].values()
    )
    model, optimizer, local = make(grid=grid, **ENDLESS)
    with local:
        with pytest.raises(ValueError, match="merge_state_dicts of every rank's|On another number of shards"):
            local.load_state_dict(own)
        local.load_state_dict(state)
        now = local.state_dict(gather=True)
        for kind in ("start", "momentum", "mean"):
            assert same_bits(state[kind], now[kind]), kind
        # In a mean over sites, all together hold back as much as before.
        for name, before in held_back(state).items():
            after = held_back(now)[name]
            assert torch.cat(before).sum() / 2 == pytest.approx(
                float(torch.cat(after).sum() / grid[0]), abs=1e-5
            )
        assert train(model, optimizer, local, rank, range(5, 12))
        local.average()
        assert_sites_same(model)


@pytest.mark.parametrize("grid", [(4, 1), (1, 4)])
def test_a_gathered_state_goes_on_with_other_numbers_of_sites_and_shards(grid, four_ranks):
    four_ranks.run(check_other_numbers, grid)


# --- sites that come and go, and what fails ---


def check_members(rank, newcomers):
    """Some ranks of site 1 have no state: the whole site takes it from the other one."""
    model, optimizer, local = make(**ENDLESS)
    with local:
        train(model, optimizer, local, rank, range(8))
        saved = saved_bytes(model.state_dict(), local.state_dict())
    model, optimizer, local = make(**ENDLESS)
    with local:
        if rank not in newcomers:
            model.load_state_dict(saved[0])
        assert local.resume(None if rank in newcomers else saved[1]) == (rank >= 2)
        assert local.num_steps == 8
        now = local.state_dict(gather=True)
        everyone = [None] * 4
        dist.all_gather_object(everyone, [now[kind] for kind in ("start", "momentum", "mean")])
        for kinds in everyone:
            assert all(same_bits(*pair) for pair in zip(kinds, everyone[0], strict=True))
        assert all(now[kind] for kind in ("start", "momentum", "mean"))
        assert same_bits(whole(model), now["start"]) == (rank >= 2)
        assert train(model, optimizer, local, rank, range(8, 12)) == [9, 12]
        if rank in (0, 2):
            with pytest.raises(ValueError, match="no site has a whole one"):
                local.resume(None)
        else:
            with pytest.raises(ValueError, match="no site has a whole one"):
                local.resume(saved[1])


@pytest.mark.parametrize("newcomers", [(2, 3), (3,)], ids=["a new site", "a site that has lost a disk"])
def test_a_site_without_the_newest_state_takes_it_from_one_that_has_it(newcomers, four_ranks):
    four_ranks.run(check_members, newcomers)


def check_failures(rank):
    """The averaging of one shard fails: no rank of any site applies that of another shard."""
    model, optimizer, local = make(period=4, recipe="int8", outer=STREAMING)
    train(model, optimizer, local, rank, range(1))
    before = local.state_dict(gather=True)["start"]
    if rank == 3:
        local._membership.engine.fail(gradwire.WireError("this rank has failed"))
    with pytest.raises(gradwire.WireError):
        train(model, optimizer, local, rank, range(1, 9))  # an averaging begins in the second step
    assert local.num_steps == 4, "all ranks know when the averaging under way should end"
    after = local.state_dict()
    assert not after["mean"]
    assert not after["turn"]["under_way"]
    assert same_bits({n: t.full_tensor() for n, t in after["start"].items()}, before)
    with pytest.raises(gradwire.WireError):
        local.step()
    local.detach()
    dist.barrier()


def test_a_shard_that_fails_keeps_all_shards_of_all_sites_as_they_were(four_ranks):
    four_ranks.run(check_failures)


def check_speeds(rank):
    """Sites differ in speed, and the clocks of a site's ranks differ: they begin averagings together."""
    clock = [0.0]
    outer = gradwire.DiLoCo(fragments=2)
    model, optimizer, local = make(period=timedelta(seconds=12), recipe="int8", outer=outer, weigh=True)
    with local:
        local._loop.turns._clock = lambda: clock[0]
        local._loop.turns.restart(0)
        while local.num_averages < 3:
            clock[0] += (3.0 if rank >= 2 else 1.0) + 0.4 * (rank % 2)
            train(model, optimizer, local, rank, [local.num_steps], work=1.0 + rank % 2)
        counts = [torch.zeros(()) for _ in range(4)]
        dist.all_gather(counts, torch.tensor(float(local.num_steps)))
        assert counts[0] == counts[1] > 2 * counts[2] == 2 * counts[3]
        local.average()
        assert_sites_same(model)


def test_sites_of_different_speeds_average_by_the_clock(four_ranks):
    four_ranks.run(check_speeds)


def check_weights(rank):
    """A site counts by the work of all its ranks, however it is spread over them."""
    model, sites = sharded(native=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = whole(model)
    with gradwire.LocalSGD(model, optimizer, sites=sites, period=1, weigh=True) as local:
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().add_(4.0 if rank >= 2 else 0.0)
        assert local.step(work=(0.0, 1.0, 2.0, 1.0)[rank])  # 1 to 3
    for name, now in whole(model).items():
        torch.testing.assert_close(now, before[name] + 3.0)


def test_a_site_weighs_by_the_work_of_all_its_ranks(four_ranks):
    four_ranks.run(check_weights)


def check_skips(rank):
    """A scaler that skips steps on one site, in the middle of a delay, keeps sites in step."""
    model, optimizer, local = make(period=4, recipe="int4", outer=gradwire.DiLoCo(fragments=2, delay=1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with local:
        for step in range(9):
            before = whole(model)
            optimizer.zero_grad()
            factor = float("inf") if rank == 3 and step in (1, 2, 5) else 1.0
            scaler.scale(loss_of(model, rank, step) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            assert same_bits(before, whole(model)) == (rank >= 2 and step in (1, 2, 5))
            assert local.step() == (step + 1 in (3, 5, 7, 9))
        local.average()
        assert_sites_same(model)
        assert all(p.isfinite().all() for p in whole(model).values())


def test_a_scaler_may_skip_the_steps_of_a_site(four_ranks):
    four_ranks.run(check_skips)


def check_refusals(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    model, sites = sharded(native=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, error, text in (
        (None, ValueError, "a sharded model needs sites="),
        (mesh, TypeError, "sites is a process group, or a DeviceMesh of one dimension"),
        (mesh["shard"], ValueError, "sites= takes the ranks that hold the same one. is 0 of 2 on rank"),
    ):
        with pytest.raises(error, match=text):
            gradwire.LocalSGD(model, optimizer, period=2, sites=wrong)
    with pytest.raises(ValueError, match="recipe is int4|different things|failed on rank 1"):
        gradwire.LocalSGD(model, optimizer, period=2, sites=sites, recipe="int4" if rank == 3 else "int8")
    with pytest.raises(ValueError, match="period must be at least 1"):
        gradwire.LocalSGD(model, optimizer, period=0 if rank == 3 else 2, sites=sites)
    ddp = DistributedDataParallel(net())
    with pytest.raises(TypeError, match="sites= goes with a"):
        gradwire.LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), period=2, sites=sites)
    part = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"shape \(4, 4\) is not sharded"):
        gradwire.LocalSGD(part, torch.optim.SGD(part.parameters(), lr=0.1), period=2, sites=sites)
    with gradwire.LocalSGD(model, optimizer, period=1, sites=sites) as local:  # nothing is left of the others
        train(model, optimizer, local, rank, range(1))
        assert_sites_same(model)


def test_what_sites_cannot_do_is_refused_on_all_ranks(four_ranks):
    four_ranks.run(check_refusals)
