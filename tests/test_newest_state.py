"""The newest state of local SGD: whose it is, and how the others take it."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.training.local_state import Turn
from gradwire.training.newest_state import Position, newest
from gradwire.training.site_call import MIXED
from tests.local_runs import flat, net, saved_bytes, train
from tests.local_runs import make as make_ddp

OPTIONS = {
    "period": 6,
    "warmup_steps": 1,
    "recipe": "int4",
    "outer": gradwire.DiLoCo(fragments=2, delay=2),
}


def noted(num_steps, num_averages, num_begun, *under_way, history="", group=""):
    turn = Turn(num_begun, num_averages, (), dict.fromkeys(under_way, 1), history, group)
    return Position(num_steps, turn).note()


@pytest.mark.parametrize(
    ("notes", "source", "current", "is_everywhere"),
    [
        (["", noted(7, 1, 1)], 1, [1], False),
        ([noted(7, 1, 1), noted(7, 1, 1)], 0, [0, 1], True),
        ([noted(9, 1, 2), noted(5, 2, 2)], 1, [1], False),
        # One has the mean of an averaging, the other has given it up; a third has not begun it.
        ([noted(8, 1, 2), noted(8, 1, 2, 0), noted(6, 1, 1)], 1, [0, 1], False),
        # One has the mean of an averaging, the other has begun another one before it gave up both.
        ([noted(6, 0, 2), noted(5, 0, 1, 1)], 1, [0, 1], False),
        # Both have the mean of an averaging, but with others.
        ([noted(8, 1, 2, 0, group="a"), noted(8, 1, 2, 0, group="b")], 0, [0, 1], False),
        # An averaging that all have given up is that of no one.
        ([noted(6, 1, 1), noted(8, 1, 2)], 1, [0, 1], True),
        ([MIXED, noted(3, 0, 0)], 1, [1], False),
    ],
)
def test_the_newest_state_has_the_most_averages(notes, source, current, is_everywhere):
    found = [newest(notes, site) for site in range(len(notes))]
    assert {each.source for each in found} == {source}
    assert [site for site, each in enumerate(found) if each.is_current] == current
    assert {each.is_everywhere for each in found} == {is_everywhere}


def test_those_that_have_averaged_apart_from_the_newest_are_not_current():
    notes = [noted(9, 2, 2, history="a" * 16), noted(8, 2, 2, history="b" * 16), noted(7, 1, 1)]
    found = [newest(notes, site) for site in range(3)]
    assert [each.is_current for each in found] == [True, False, False]
    assert [each.is_apart for each in found] == [False, True, False]


def test_in_a_warm_up_those_with_fewer_steps_are_behind():
    for steps, current in (([3, 4, 4], [1, 2]), ([3, 7, 6], [1, 2]), ([7, 5, 8], [0, 1, 2])):
        notes = [noted(num_steps, 0, 0) for num_steps in steps]
        found = [newest(notes, site, warmup_steps=5) for site in range(3)]
        assert [site for site, each in enumerate(found) if each.is_current] == current
        assert {each.is_everywhere for each in found} == {current == [0, 1, 2]}


def test_one_that_is_still_warming_up_has_not_averaged_apart():
    notes = [noted(4, 0, 0), noted(6, 0, 0, history="a" * 16)]
    found = [newest(notes, site, warmup_steps=5) for site in range(2)]
    assert [(each.is_current, each.is_apart) for each in found] == [(False, False), (True, False)]


def test_nobody_has_a_state_or_none_is_whole():
    assert newest(["", ""], 0) is None
    with pytest.raises(ValueError, match="the ranks of site 1 have states of different steps"):
        newest(["", MIXED], 0)


def check_saved_states(rank):
    """Rank 3 is lost in an averaging, rank 0 joins with nothing, rank 1 has an old state."""
    model, optimizer, local = make_ddp(**OPTIONS)
    with local:
        train(model, optimizer, local, rank, range(6))
        old = saved_bytes(model.module.state_dict(), optimizer.state_dict(), local.state_dict())
        train(model, optimizer, local, rank, range(6, 8))
        new = saved_bytes(model.module.state_dict(), optimizer.state_dict(), local.state_dict())
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    if rank == 3:
        return
    torch.manual_seed(100 + rank)
    model = DistributedDataParallel(net(), process_group=groups[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with gradwire.LocalSGD(model, optimizer, **OPTIONS) as local:
        weights, optimizer_state, state = [None, old, new][rank] or (None, None, None)
        if state is not None:
            model.module.load_state_dict(weights)
            optimizer.load_state_dict(optimizer_state)
        assert local.resume(state) == (rank < 2)
        assert local.num_steps == 8
        now = local.state_dict()
        everyone = [None] * 3
        dist.all_gather_object(
            everyone, [now[key] for key in ("start", "momentum", "mean", "turn")], groups[0]
        )
        for other in everyone:
            for mine, theirs in zip(everyone[2], other, strict=True):
                assert mine.keys() == theirs.keys()
                for key, value in mine.items():
                    if key != "work":
                        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
                        assert same(value, theirs[key]), key
        if rank == 2:
            assert all(torch.equal(p, weights[name]) for name, p in model.module.named_parameters())
        else:
            assert all(torch.equal(p, now["start"][name]) for name, p in model.module.named_parameters())
            assert not now["averaging"]["entries"], "what an old state has held back is no longer to be sent"
        ended = train(model, optimizer, local, rank, range(8, 16))
        assert ended == [9, 12, 15]
        local.average()
        mine = flat(model)
        flats = [torch.empty_like(mine) for _ in range(3)]
        dist.all_gather(flats, mine, groups[0])
        assert all(torch.equal(mine, other) for other in flats)


def test_those_without_the_newest_state_take_it_from_one_that_has_it(four_ranks):
    four_ranks.run(check_saved_states)


def check_a_warm_up(rank):
    """Gradients go on by the stage of the recipe that they had come to."""
    options = {"period": 2, "warmup_steps": 6, "gradient_recipe": "schedule(0=fp32; 2=int8)"}
    model, optimizer, local = make_ddp(**options)
    with local:
        train(model, optimizer, local, rank, range(3))
        state = local.state_dict()
    model, optimizer, local = make_ddp(**options)
    with local:
        assert local.resume(state if rank else None) == (rank == 0)
        before = local._membership.gradients.wire.stats().bytes_sent
        train(model, optimizer, local, rank, range(3, 4))
        wire = local._membership.gradients.wire
        sent = wire.stats().bytes_sent - before
        assert sent == wire.plan(step=3).bytes_sent < wire.plan(step=0).bytes_sent / 2
        assert local.state_dict()["wire"]["step"] == local.num_steps == 4
        local.resume({**state, "num_steps": 0})
        assert local.state_dict()["wire"]["step"] == local.num_steps == 0


def test_a_warm_up_goes_on_at_its_step(two_ranks):
    two_ranks.run(check_a_warm_up)
