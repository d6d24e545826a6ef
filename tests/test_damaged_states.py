"""States that somebody has changed: refused on every rank, with nothing loaded on any."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.testing import VirtualRanks

# Values that are wrong in every field, except where a field may have them.
ODD = [
    None,
    True,
    -1,
    0,
    1.5,
    math.nan,
    math.inf,
    10**400,
    2**63,
    "load",
    "\ud800",
    b"x",
    [],
    [[]],
    {},
    {"rank0": 1},
    {3: {}},
    torch.zeros(7),
    torch.zeros(()),
    object(),
    lambda: 0,
]
KEYS = [
    "residual:load",
    "residual:nn",
    "residual:float33",
    "residual:int32",
    "residual:",
    "residual",
    ":float32",
]


def parts(state, path=()):
    """Yield the path of every part of a state."""
    yield path
    if isinstance(state, dict):
        for key in state:
            yield from parts(state[key], (*path, key))
    elif isinstance(state, list):
        for number in range(min(len(state), 2)):
            yield from parts(state[number], (*path, number))


def replaced(state, path, value):
    """Return a copy of a state with another value at ``path``."""
    if not path:
        return value
    whole = copy.deepcopy(state)
    place = whole
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return whole


def renamed(state, path, name):
    whole = copy.deepcopy(state)
    place = whole
    for key in path[:-1]:
        place = place[key]
    place[name] = place.pop(path[-1])
    return whole


def at(state, path):
    for key in path:
        state = state[key]
    return state


def damaged(state):
    """Yield states with one part that is wrong, each with a text that tells what was done."""
    for path in parts(state):
        own = at(state, path)
        for value in ODD:
            if not is_fine(path, value):
                yield f"{path} = {value!r:.40}", replaced(state, path, value)
        if path and isinstance(path[-1], str):
            for name in (*KEYS, "rank7", "rank-1", "rank00", "x", 3, None):
                yield f"{path} renamed to {name!r}", renamed(state, path, name)
        if isinstance(own, list) and path != ("layouts",):
            yield f"{path} without an end", replaced(state, path, own[:-1])
            yield f"{path} with more", replaced(state, path, [*own, own[-1]])
        if isinstance(own, torch.Tensor):
            others = own[..., :-1], own.double(), own.int(), own.to_sparse(), own.to("meta"), own.tolist()
            for other in others:
                yield f"{path} of {type(other).__name__}", replaced(state, path, other)
    for key in KEYS:
        own = copy.deepcopy(state)
        rename_states(own, key)
        yield f"all states called {key!r}", own


def is_fine(path, value):
    """Return True for a value that a field may have, whatever the other fields are."""
    if path == ("recipe",):
        return isinstance(value, str)
    if path == ("loss_scale",):
        return value is None or (type(value) in (int, float) and 0 < value < 2.0**100)
    if path == ("step",) or (path[:1] == ("layouts",) and path[2:] == (0,)):
        return type(value) is int and value == 0
    if path == ("layouts",):
        return isinstance(value, list) and not value
    return False


def rename_states(state, key):
    for rank in state["memory"].values():
        rank[key] = rank.pop("residual:float32")
    for entry in state["entries"]:
        entry[0] = key


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return first == second


def make():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    return model, gradwire.attach(model, "int4")


def train(model, rank):
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 3)).square().mean().backward()


def check_refused(load, state, what, before, save):
    try:
        load(state)
    except (ValueError, TypeError):
        pass
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    else:
        raise AssertionError(f"{what}: accepted")
    assert same(before, save()), f"{what}: changed"


def check_wires_refuse(rank, whose):
    model, wire = make()
    with wire:
        train(model, rank)
        good, (_, fresh) = wire.state_dict(), make()
        with fresh:
            before = fresh.state_dict()
            for what, state in damaged(good):
                mine = state if whose in ("all", rank) else good
                check_refused(fresh.load_state_dict, mine, what, before, fresh.state_dict)
            fresh.load_state_dict(good)
            assert same(fresh.state_dict(), good)


@pytest.mark.parametrize("whose", ["all", 0, 1])
def test_a_damaged_state_of_a_wire_is_refused_on_all_ranks_and_changes_nothing(whose, two_ranks):
    two_ranks.run(check_wires_refuse, whose)


def test_virtual_ranks_refuse_a_damaged_state_and_change_nothing():
    model = nn.Linear(3, 2)
    ranks = VirtualRanks(model, "int4", world_size=2)
    for _ in range(3):
        for rank in range(2):
            with ranks.backward_of(rank):
                model(torch.randn(4, 3)).square().mean().backward()
        ranks.average()
    good = ranks.state_dict()
    for what, state in damaged(good):
        check_refused(ranks.load_state_dict, state, what, good, ranks.state_dict)
    ranks.load_state_dict(good)


def is_fine_in_local_sgd(path, value):
    """Return True for a value that a field may have: counts, and amounts of work."""
    if path in [("num_steps",), ("turn", "num_begun"), ("turn", "num_averages")]:
        return type(value) is int and value == 0
    if path == ("turn", "work", 0):
        return type(value) is float and value == 1.5
    may_be_empty = [("turn", "work"), ("turn", "under_way"), ("mean",), ("begun",)]
    return path in may_be_empty and isinstance(value, list | dict) and not value


def check_local_sgd_refuses(rank, whose):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.LocalSGD(model, optimizer, period=2, recipe="int4", outer=gradwire.SlowMo()) as local:
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            local.step()
        good = local.state_dict()
        for path in parts(good):
            if path[:1] not in [("averaging",), ("wire",)] or len(path) == 1:
                for value in ODD:
                    if not is_fine_in_local_sgd(path, value):
                        mine = replaced(good, path, value) if whose in ("all", rank) else good
                        what = f"{path} = {value!r:.40}"
                        check_refused(local.load_state_dict, mine, what, good, local.state_dict)
        local.load_state_dict(good)


@pytest.mark.parametrize("whose", ["all", 1])
def test_a_damaged_state_of_local_sgd_is_refused_on_all_ranks_and_changes_nothing(whose, two_ranks):
    two_ranks.run(check_local_sgd_refuses, whose)
