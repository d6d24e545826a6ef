"""Members that come and go: local SGD goes on with another group, and no process starts again."""

import gc
import os
import signal
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.peers import all_gather_bytes, close_connections
from gradwire.ranks import rank_process
from gradwire.testing import RanksFailed, run_ranks
from gradwire.torch_private import PrefixStore, default_store
from gradwire.training import finite_means, outer_loop, state_sharing
from gradwire.training.fragments import Fragment, broadcast
from tests.local_runs import flat, net, train
from tests.logs import logged
from tests.site_runs import make as make_sharded
from tests.site_runs import sharded, whole
from tests.site_runs import train as train_sharded

OPTIONS = {"period": 6, "recipe": "int4", "outer": gradwire.DiLoCo(fragments=2, delay=2)}


# --- groups beside torch's world ---


def group_of(name, members, rank):
    """Return a group of some ranks of the world, whatever the others do."""
    store = PrefixStore(name, default_store())
    return gradwire.make_group(store, members.index(rank), len(members))


def check_error_of_torch(rank):
    """torch cannot name such a group in its log; the error is that of the connection all the same."""
    group = group_of("broken", [0, 1], rank) if rank < 2 else None
    dist.barrier()  # both have connected
    if rank == 1:
        close_connections(group)
    if rank > 0:
        return
    calls = (
        lambda: all_gather_bytes(b"mine", group),
        lambda: broadcast(torch.zeros(3), group, 1, torch.device("cpu")),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="(?i)gloo|connection"):
            call()


def test_a_member_that_is_lost_is_an_error_of_the_connection(four_ranks):
    four_ranks.run(check_error_of_torch)


def test_a_group_over_a_store_needs_no_world():
    assert not dist.is_initialized()
    group = gradwire.make_group(dist.HashStore(), 0, 1)
    values = torch.tensor([1.0, 2.0])
    with gradwire.Averager("int8", group) as averager:
        averager.average_([values])
    assert values.tolist() == [1.0, 2.0]
    with pytest.raises(RuntimeError, match="an Averager needs a process group"):
        gradwire.Averager("int8")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((None, 0, 1), TypeError, "store is a torch.distributed.Store, such as a TCPStore, not NoneType"),
        ((dist.HashStore(), "0", 1), TypeError, "rank is a whole number, not '0'"),
        ((dist.HashStore(), 2, 2), ValueError, "a group of 2 ranks has ranks from 0 to 1, and no rank 2"),
        ((dist.HashStore(), -1, 1), ValueError, "and no rank -1"),
        ((dist.HashStore(), 0, 1, 5), TypeError, "timeout is a datetime.timedelta, not 5"),
    ],
)
def test_a_group_that_cannot_be_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        gradwire.make_group(*arguments)


def test_groups_of_the_past_are_freed():
    groups = [gradwire.make_group(dist.HashStore(), 0, 1) for _ in range(3)]
    past = [weakref.ref(group) for group in groups[:2]]
    model, optimizer, local = make(0.0, groups[0], recipe="fp32", period=1, outer=None)
    with local:
        for group in groups[1:]:
            train(model, optimizer, local, 0, range(2))
            local.regroup(group)
        groups[:2] = []
        del group
        gc.collect()
        assert [each() for each in past] == [None, None]
        with pytest.raises(TypeError, match="a plain model needs the ranks"):
            local.regroup(None)
        train(model, optimizer, local, 0, range(1))
        assert local.num_averages == 5


# --- a plain model on each ---


def make(seed, group, **options):
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(seed)  # which a newcomer must lose
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gradwire.LocalSGD(model, optimizer, sites=group, **{**OPTIONS, **options})


def assert_same_outer_state(local, group):
    """Compare the last average, the momentum and the means under way over a group; return the first."""
    state = local.state_dict()
    own = {f"{kind}.{n}": t for kind in ("start", "momentum", "mean") for n, t in state[kind].items()}
    everyone = [None] * group.size()
    dist.all_gather_object(everyone, (own, local.num_steps, local.num_averages), group=group)
    for tensors, *counts in everyone:
        assert counts == [local.num_steps, local.num_averages]
        assert tensors.keys() == own.keys()
        assert all(torch.equal(tensors[name], own[name]) for name in own)
    return state["start"]


def assert_same_model(model, group):
    everyone = [torch.empty_like(flat(model)) for _ in range(group.size())]
    dist.all_gather(everyone, flat(model), group=group)
    assert all(torch.equal(everyone[0], other) for other in everyone)


def check_members(rank):
    first, second = [0, 1, 2], [3, 0, 1]  # 2 leaves and 3 joins, with the lowest rank
    if rank in first:
        model, optimizer, local = make(0.0, group_of("first", first, rank))
        train(model, optimizer, local, rank, range(7))
        assert local.state_dict()["turn"]["under_way"], "members change in the middle of a delay"
    if rank == 2:
        local.detach()
    if rank in second:
        group = group_of("second", second, rank)
        if rank == 3:
            model, optimizer, local = make(100.0, group)
        else:
            before = flat(model)
            assert not local.regroup(group)
            assert torch.equal(flat(model), before), "each goes on with its own steps"
        assert local.num_steps == 7
        average = assert_same_outer_state(local, group)
        is_average = all(torch.equal(p, average[name]) for name, p in model.named_parameters())
        assert is_average == (rank == 3)
        assert train(model, optimizer, local, rank, range(7, 14)) == [8, 11, 14]
        local.average()
        assert_same_model(model, group)
        assert local.stats().bytes_sent > 0
    if rank == 0:  # nobody else is left
        before = flat(model)
        assert not local.regroup(group_of("third", [0], rank))
        assert train(model, optimizer, local, rank, range(14, 20)) == [17, 20]
        assert not torch.equal(flat(model), before)
    if rank in (0, 2):  # and one comes back that has missed two groups
        group = group_of("fourth", [0, 2], rank)
        assert local.regroup(group) == (rank == 2)
        assert local.num_steps == 20
        assert_same_outer_state(local, group)
        assert train(model, optimizer, local, rank, range(20, 24)) == [23]
        local.average()
        assert_same_model(model, group)
    local.detach()
    dist.barrier()


def test_members_leave_and_join_in_the_middle_of_a_delay(four_ranks):
    four_ranks.run(check_members)


def check_apart(rank):
    """Two groups begin together, train apart for as long, and meet again."""
    model, optimizer, local = make(0.0, group_of("one", [0, 1, 2, 3], rank))
    train(model, optimizer, local, rank, range(8))
    pair = [0, 1] if rank < 2 else [2, 3]
    assert not local.regroup(group_of(f"pair {pair}", pair, rank))
    train(model, optimizer, local, rank, range(8, 14))
    with logged() as told:
        group = group_of("again", [0, 1, 2, 3], rank)
        assert local.regroup(group) == (rank >= 2)
    assert ("the two trained apart" in "".join(told)) == (rank >= 2)
    assert_same_outer_state(local, group)
    train(model, optimizer, local, rank, range(14, 18))
    local.average()
    assert_same_model(model, group)
    with logged() as told:  # all have been together since
        assert not local.regroup(group_of("once more", [0, 1, 2, 3], rank))
    assert not told
    local.detach()
    dist.barrier()


def test_groups_that_trained_apart_for_as_long_go_on_from_one_of_them(four_ranks):
    four_ranks.run(check_apart)


def check_apart_in_a_delay(rank):
    """Two groups begin to average apart, and meet again before they have ended that."""
    model, optimizer, local = make(0.0, group_of("whole", [0, 1, 2, 3], rank))
    train(model, optimizer, local, rank, range(8))
    half = [0, 1] if rank < 2 else [2, 3]
    local.regroup(group_of(f"half {half}", half, rank))
    train(model, optimizer, local, rank, range(8, 10))
    assert local.state_dict()["turn"]["under_way"]
    group = group_of("whole again", [0, 1, 2, 3], rank)
    before = flat(model)
    assert not local.regroup(group)
    assert torch.equal(flat(model), before), "each goes on with its own steps"
    assert_same_outer_state(local, group)
    train(model, optimizer, local, rank, range(10, 16))
    local.average()
    assert_same_model(model, group)
    local.detach()
    dist.barrier()


def test_groups_that_meet_while_each_averages_apart_take_one_mean(four_ranks):
    four_ranks.run(check_apart_in_a_delay)


def check_lost_member(rank):
    """Rank 2 ends without a word: the others learn of it in a step, and go on without it."""
    if rank < 3:
        group = group_of("with all", [0, 1, 2], rank)
        model, optimizer, local = make(0.0, group, recipe="powersgd:rank=1")
        assert train(model, optimizer, local, rank, range(8)) == [5, 8]
        assert local.state_dict()["averaging"]["entries"]
    if rank == 2:
        local.detach()  # its ninth step would begin an averaging
    if rank < 2:
        with pytest.raises(gradwire.WireError):
            train(model, optimizer, local, rank, range(8, 15))
        before, num_steps = flat(model), local.num_steps
        assert 9 <= num_steps <= 11
        assert not local.state_dict()["averaging"]["entries"], "steps to average again are in no residual"
        group = group_of("without one", [0, 1], rank)
        assert not local.regroup(group)
        assert torch.equal(flat(model), before)
        assert num_steps <= local.num_steps <= 11
        assert local.num_averages == 2
        assert_same_outer_state(local, group)
        assert not local.state_dict()["averaging"]["entries"]
        assert train(model, optimizer, local, rank, range(local.num_steps, 18)) == [14, 17]
        local.average()
        assert_same_model(model, group)
        local.detach()
    dist.barrier()


def test_a_state_has_no_mean_of_an_averaging_that_fails_while_it_is_saved(monkeypatch):
    model, optimizer, local = make(0.0, gradwire.make_group(dist.HashStore(), 0, 1))
    wait = Fragment.wait

    def fail_and_wait(fragment):
        if fragment.is_under_way:
            local._membership.engine.fail(gradwire.PeerError("rank 1 is lost"))
        return wait(fragment)

    with local:
        train(model, optimizer, local, 0, range(4))
        assert local.state_dict()["turn"]["under_way"]
        monkeypatch.setattr(Fragment, "wait", fail_and_wait)
        state = local.state_dict()
        assert not state["turn"]["under_way"]
        assert not state["mean"]


def check_lost_source(rank):
    """Rank 2 has the newest state, and is lost while the others take it: they go on with what they had."""
    if rank < 3:
        own = [0, 1] if rank < 2 else [2]
        model, optimizer, local = make(0.0, group_of(f"before {own}", own, rank))
        train(model, optimizer, local, rank, range(7 if rank < 2 else 13))
        before, group = flat(model), group_of("interrupted", [0, 1, 2], rank)
        num_shared = 0

        def lose_source(*arguments, **options):
            nonlocal num_shared
            num_shared += 1
            if rank == 2 and num_shared == 4:  # in the second fragment
                close_connections(group)
            broadcast(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state_sharing, "broadcast", lose_source)
            with pytest.raises(RuntimeError):
                local.regroup(group)
        assert num_shared == 4
        assert torch.equal(flat(model), before)
    if rank < 2:
        group = group_of("without the source", [0, 1], rank)
        assert not local.regroup(group)
        assert torch.equal(flat(model), before)
        train(model, optimizer, local, rank, range(7, 14))
        local.average()
        assert_same_model(model, group)
    if rank < 3:
        local.detach()
    dist.barrier()


def test_a_source_that_is_lost_while_others_take_its_state_leaves_them_theirs(four_ranks):
    four_ranks.run(check_lost_source)


def check_diverged_member(rank):
    """Rank 2 diverges and leaves. The others look at means as on a GPU, and have not begun the next one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer_loop, "looks_first", lambda values: False)
        patch.setattr(finite_means, "looks_first", lambda values: False)
        if rank < 3:
            model, optimizer, local = make(0.0, group_of("diverging", [0, 1, 2], rank))
            train(model, optimizer, local, rank, range(2))
            if rank == 2:
                with torch.no_grad():
                    model[2].bias[3] = float("nan")
            train(model, optimizer, local, rank, range(2, 5))
            assert local.num_averages == 1
        if rank == 2:
            local.detach()
        if rank < 2:
            group = group_of("finite", [0, 1], rank)
            assert not local.regroup(group)
            assert not local.state_dict()["averaging"]["entries"]
            train(model, optimizer, local, rank, range(5, 12))
            local.average()
            assert_same_model(model, group)
            assert flat(model).isfinite().all()
            local.detach()
        dist.barrier()


def test_a_member_that_diverges_and_leaves_is_not_an_error_of_those_that_go_on(four_ranks):
    four_ranks.run(check_diverged_member)


@pytest.mark.full
def test_a_member_that_is_lost_in_an_averaging_costs_its_own_steps_alone(four_ranks):
    four_ranks.run(check_lost_member)


def check_factors(rank):
    """Low-rank factors of those that stay are of no use with one that joins: all begin with new ones."""
    if rank < 2:
        model, optimizer, local = make(0.0, group_of("with factors", [0, 1], rank), recipe="acp:rank=1")
        train(model, optimizer, local, rank, range(8))
    group = group_of("with new factors", [0, 1, 2], rank) if rank < 3 else None
    if rank < 2:
        local.regroup(group)
    if rank == 2:
        model, optimizer, local = make(100.0, group, recipe="acp:rank=1")
    if rank < 3:
        state = local.state_dict(gather=True)["averaging"]["memory"]
        held = [sum(float(t.abs().sum()) for t in own["residual:float32"].values()) for own in state.values()]
        assert [amount > 0 for amount in held] == [True, True, False], "one that joins has held back nothing"
        train(model, optimizer, local, rank, range(8, 12))
        local.average()
        assert_same_model(model, group)
        local.detach()
    dist.barrier()


@pytest.mark.full
def test_low_rank_begins_anew_when_a_member_joins(four_ranks):
    four_ranks.run(check_factors)


def job_killed(rank):
    model, optimizer, local = make(0.0, group_of("before", [0, 1, 2], rank))
    train(model, optimizer, local, rank, range(2))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)  # before its third step, in which an averaging begins
    with pytest.raises(gradwire.WireError):
        train(model, optimizer, local, rank, range(2, 9))
    group = group_of("after", [0, 1], rank)
    assert not local.regroup(group)
    train(model, optimizer, local, rank, range(local.num_steps, 12))
    local.average()
    assert_same_model(model, group)
    local.detach()


@pytest.mark.full
def test_members_go_on_after_one_is_killed(monkeypatch):
    monkeypatch.setattr(rank_process, "_GRACE_S", 120.0)  # those that are left have work to do
    with pytest.raises(RanksFailed) as caught:
        run_ranks(job_killed, 3, 240)
    assert caught.value.errors.keys() == {2}, caught.value


def check_lost_before_an_average(rank):
    """Ranks by the clock wait for each other outside of an averaging; a loss is an error as in one."""
    group = group_of("by the clock", [0, 1], rank) if rank < 2 else None
    if rank < 2:
        model, optimizer, local = make(0.0, group, period=timedelta(hours=1))
        train(model, optimizer, local, rank, range(2))
    dist.barrier()
    if rank == 1:
        close_connections(group)
        local.detach()
    if rank == 0:
        before = flat(model)
        with pytest.raises(gradwire.WireError, match="rank 0, step 0"):
            local.average()
        assert torch.equal(flat(model), before)
        assert not local.regroup(group_of("alone", [0], rank))
        local.average()
        local.detach()
    dist.barrier()


def test_a_member_that_is_lost_before_an_average_by_the_clock_is_a_wire_error(four_ranks):
    four_ranks.run(check_lost_before_an_average)


# --- sharded sites ---


def check_sites(rank):
    site, shard = divmod(rank, 2)

    def over(name, *sites):
        return group_of(f"{name} of shard {shard}", list(sites), site)

    model, _ = sharded(native=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    local = gradwire.LocalSGD(model, optimizer, sites=over("both", 0, 1), **OPTIONS)
    train_sharded(model, optimizer, local, rank, range(4))  # an averaging is under way
    if site == 1:
        local.detach()
    else:
        assert not local.regroup(over("alone", 0))
        train_sharded(model, optimizer, local, rank, range(4, 9))
        assert local.num_averages >= 1
    assert local.regroup(over("again", 0, 1)) == (site == 1)
    assert local.num_steps == 9
    assert train_sharded(model, optimizer, local, rank, range(9, 12)) == [11]
    local.average()
    everyone = [None] * 4
    dist.all_gather_object(everyone, whole(model))
    assert all(torch.equal(everyone[0][name], other[name]) for other in everyone for name in other)
    local.detach()


def test_a_sharded_site_leaves_and_comes_back(four_ranks):
    four_ranks.run(check_sites)


# --- what does not work ---


def check_refusals(rank):
    world = dist.group.WORLD
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="has its group"):
        gradwire.LocalSGD(model, optimizer, period=2, sites=world)
    with (
        gradwire.LocalSGD(model, optimizer, period=2) as local,
        pytest.raises(TypeError, match="keeps its process group: give LocalSGD the plain model"),
    ):
        local.regroup(world)
    with pytest.raises(ValueError, match="leave warmup_steps out"):
        make(0.0, world, warmup_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_DISABLE", "1")
        _, _, local = make(0.0, world)
        local.detach()
        assert str(local.recipe) == "fp32"
    _, _, local = make_sharded(native=True, **OPTIONS)
    with local, pytest.raises(TypeError, match="sharded over a mesh of all sites"):
        local.regroup(world)
    model, optimizer, local = make(0.0, world)
    with local:
        train(model, optimizer, local, rank, range(2))
        with pytest.raises(
            ValueError, match="ranks call gradwire.LocalSGD with different things: .*period is"
        ):
            if rank == 3:
                make(0.0, group_of("other period", [0, 3], rank), period=8)
            elif rank == 0:
                local.regroup(group_of("other period", [0, 3], rank))
            else:
                raise ValueError("ranks call gradwire.LocalSGD with different things: period is")
        if rank == 0:  # a second try goes on from where it was
            assert not local.regroup(group_of("second try", [0], rank))
            assert train(model, optimizer, local, rank, range(2, 6)) == [5]
    dist.barrier()


@pytest.mark.full
def test_what_cannot_regroup_is_refused_and_can_be_tried_again(four_ranks):
    four_ranks.run(check_refusals)
