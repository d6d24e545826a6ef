"""A DiLoCo that streams: fragments that are averaged in turn, while training goes on."""

import io
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.training.partition import divide, layer_of
from gradwire.training.turns import TurnsBySteps, TurnsByTime
from tests.local_runs import assert_same_on_all_ranks, flat, loss_of, net

# --- which parameters share a fragment ---

LAYERS = {"embed.weight": 100, **{f"blocks.{i}.w": 30 for i in range(6)}, "norm.weight": 2, "head.weight": 98}


def sizes(divided):
    return [sum(LAYERS[name] for name in own) for own in divided]


def test_a_layer_is_a_name_up_to_its_first_number_or_the_module():
    names = ["h.3.mlp.0.weight", "wte.weight", "scale", "0.weight"]
    assert [layer_of(name) for name in names] == ["h.3", "wte", "scale", "0"]


@pytest.mark.parametrize("order", ["strided", "consecutive"])
@pytest.mark.parametrize("num_fragments", [1, 2, 3, 9])
def test_fragments_have_each_parameter_once_and_nearly_as_many_values(order, num_fragments):
    divided = divide(LAYERS, num_fragments, order)
    assert sorted(name for own in divided for name in own) == sorted(LAYERS)
    assert all(own and own == [name for name in LAYERS if name in own] for own in divided)
    if num_fragments <= 3:
        assert max(sizes(divided)) <= 1.15 * sum(LAYERS.values()) / num_fragments


def test_strided_fragments_are_spread_and_consecutive_ones_are_neighbours():
    alike = {f"{i}.w": 5 for i in range(6)}
    assert divide(alike, 2) == [["0.w", "2.w", "4.w"], ["1.w", "3.w", "5.w"]]
    assert divide(alike, 2, "consecutive") == [["0.w", "1.w", "2.w"], ["3.w", "4.w", "5.w"]]


def test_patterns_name_the_fragments():
    outer = gradwire.DiLoCo(fragments=["embed.*", ["blocks.[0-2].*", "head.*"], "*"])
    found = outer.divide(LAYERS)
    assert found[0] == ["embed.weight"]
    assert found[1] == ["blocks.0.w", "blocks.1.w", "blocks.2.w", "head.weight"]
    assert outer == gradwire.DiLoCo(fragments=[["embed.*"], ["blocks.[0-2].*", "head.*"], ["*"]])
    for wrong, text in (
        (["embed.*", "blocks.*"], "'norm.weight' is in no fragment"),
        (["*", "head.*"], r"fragment \['head.\*'\] has no parameter"),
        (10, "9 layers .* too few for 10 fragments"),
    ):
        with pytest.raises(ValueError, match=text):
            gradwire.DiLoCo(fragments=wrong).divide(LAYERS)


# --- when each has its turn ---


def test_turns_are_spread_evenly_over_a_period():
    turns = TurnsBySteps(10, 4)
    assert [turns.due(step) for step in range(1, 21)] == 2 * [
        None, 1, None, None, 2, None, 3, None, None, 0,
    ]  # fmt: skip


def test_turns_by_the_clock_go_on_in_order_and_do_not_make_up_for_a_pause():
    clock = [0.0]
    turns = TurnsByTime(timedelta(seconds=8), 4, lambda: clock[0])

    def due_at(now):
        clock[0] = now
        return turns.due(0)

    found = [due_at(now) for now in (1, 2, 3, 5, 100, 100.5, 101, 102)]
    assert found == [None, 1, None, 2, 3, None, None, 0]


# --- against the paper's loop ---


def streaming_loop(rank, num_steps, period, outer):
    """Algorithm 2 of Douillard et al. 2025, with all-reduces of torch and no overlap."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in named.items()}
    momentum = {name: torch.zeros_like(p) for name, p in named.items()}
    fragments = outer.divide({name: p.numel() for name, p in named.items()})
    under_way = {}
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        loss_of(model, rank, step - 1).backward()
        optimizer.step()
        with torch.no_grad():
            for number, own in enumerate(fragments):
                if step % period == number * period // len(fragments):
                    for name in own:
                        moved = (start[name] - named[name]).double()
                        dist.all_reduce(moved)
                        under_way[name] = step + outer.delay, (moved / dist.get_world_size()).float()
            for name, (end, mean) in list(under_way.items()):
                if end == step:
                    momentum[name].mul_(outer.momentum).add_(mean)
                    start[name] -= outer.lr * (mean + outer.momentum * momentum[name])
                    named[name].copy_(outer.alpha * named[name] + (1 - outer.alpha) * start[name])
                    del under_way[name]
    return flat(model)


def train(model, optimizer, local, rank, steps):
    ended = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if local.step():
            ended.append(step + 1)
    return ended


def make(**options):
    model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gradwire.LocalSGD(model, optimizer, **options)


def check_the_papers_loop(rank):
    for outer in (
        gradwire.DiLoCo(fragments=3),
        gradwire.DiLoCo(fragments=2, delay=3, alpha=0.25),
        gradwire.DiLoCo(fragments=[["4.*"], ["*"]], delay=1),
        gradwire.DiLoCo(delay=5, alpha=0.0),
    ):
        expected = streaming_loop(rank, 20, 6, outer)
        for recipe, bound in (("fp32", 2e-6), ("int8", 2.0**-6)):
            model, optimizer, local = make(period=6, outer=outer, recipe=recipe)
            with local:
                ended = train(model, optimizer, local, rank, range(20))
                num_fragments = outer.num_fragments
                begun = [
                    s for s in range(1, 21) if s % 6 in {i * 6 // num_fragments for i in range(num_fragments)}
                ]
                assert ended == [s + outer.delay for s in begun if s + outer.delay <= 20]
                error = (flat(model) - expected).abs().max() / expected.abs().max()
                assert error <= bound, (outer, recipe, error)
                local.average()
                assert_same_on_all_ranks(model)


def test_streaming_is_the_papers_loop(two_ranks):
    two_ranks.run(check_the_papers_loop)


# --- every ending ---

ENDLESS = {
    "period": 6,
    "warmup_steps": 1,
    "recipe": "int4",  # has residuals to go on with
    "outer": gradwire.DiLoCo(fragments=2, delay=2),
}


def saved_bytes(*states):
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_resumes_in_a_delay(rank):
    for saved_after in (1, 5, 6, 8, 9):  # in the warm-up, and around the first two averagings
        model, optimizer, local = make(**ENDLESS)
        with local:
            train(model, optimizer, local, rank, range(saved_after))
            saved = saved_bytes(model.module.state_dict(), optimizer.state_dict(), local.state_dict())
            assert bool(saved[2]["mean"]) == (saved_after in (5, 8))
            train(model, optimizer, local, rank, range(saved_after, 16))
        resumed, resumed_optimizer, local = make(**ENDLESS)
        with local:
            train(resumed, resumed_optimizer, local, rank, range(5))  # has a delay of its own to forget
            resumed.module.load_state_dict(saved[0])
            resumed_optimizer.load_state_dict(saved[1])
            local.load_state_dict(saved[2])
            train(resumed, resumed_optimizer, local, rank, range(saved_after, 16))
            assert torch.equal(flat(model), flat(resumed)), saved_after
            assert local.state_dict()["turn"]["num_averages"] == 4


def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_delay(two_ranks):
    two_ranks.run(check_resumes_in_a_delay)


def check_a_state_of_other_fragments(rank):
    model, optimizer, local = make(**ENDLESS)
    with local:
        train(model, optimizer, local, rank, range(5))
        during = local.state_dict()
        local.average()
        between = local.state_dict()
    others = {**ENDLESS, "outer": gradwire.DiLoCo(fragments=3)}
    model, optimizer, local = make(**others)
    with local:
        with pytest.raises(ValueError, match="saved during an averaging, with 2 fragments; there are 3 now"):
            local.load_state_dict(during)
        local.load_state_dict(between)
        for name, tensor in local.state_dict()["start"].items():
            assert torch.equal(tensor, between["start"][name])


def test_fragments_may_change_between_averagings_only(two_ranks):
    two_ranks.run(check_a_state_of_other_fragments)


def check_members_change(rank):
    """Rank 3 is lost in an averaging, rank 0 joins with nothing, rank 1 has an old state."""
    model, optimizer, local = make(**ENDLESS)
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
    with gradwire.LocalSGD(model, optimizer, **ENDLESS) as local:
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
    four_ranks.run(check_members_change)
