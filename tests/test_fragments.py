"""The fragments of a model that local SGD averages in turn: their parameters, and their turns."""

from datetime import timedelta

import pytest

import gradwire
from gradwire.training.partition import divide, layer_of
from gradwire.training.turns import TurnsBySteps, TurnsByTime

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
