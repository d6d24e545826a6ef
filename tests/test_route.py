"""Recipes by parameter."""

import pickle

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.exchanges.selector import Selector
from gradwire.recipes.plan import make_plan
from tests.conservation import check_nothing_is_lost
from tests.models import backward, small_model

CHOSEN = gradwire.route({"*.bias": "fp32", "2.*": "bf16", "*": "int4"})


def check_results(rank):
    plain, model = small_model(), small_model()
    with gradwire.attach(model, CHOSEN) as wire:
        for step in range(4):
            backward(plain, step)
            backward(model, step)
            for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
                error = (p.grad - q.grad).abs().max() / q.grad.abs().max()
                bound = 1e-6 if name.endswith("bias") else 2**-7 if name.startswith("2.") else 0.9
                assert error <= bound, name
                mine = p.grad.clone()
                dist.broadcast(mine, 0)
                assert torch.equal(mine, p.grad), "ranks are the same, bit for bit"
        assert any(
            (p.grad - q.grad).any() for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )
        (memory,) = wire.state_dict()["memory"].values()
        assert set(memory["residual:float32"]) == {"0.weight", "4.weight", "5.weight"}


def test_parameters_go_by_their_routes(two_ranks):
    two_ranks.run(check_results)


def check_plan(rank):
    model = small_model()
    with gradwire.attach(model, CHOSEN) as wire:
        before = wire.plan()
        assert [route.recipe for route in before.routes] == ["*.bias=fp32", "2.*=bf16", "*=int4"]
        assert before.routes[1].parameters == ("2.weight",)
        assert str(before.routes[0].bytes_sent) in str(before), "it prints"
        for step in range(4):
            backward(model, step)
        sent = sum(bucket.bytes_sent for bucket in wire.stats().steps[-1].buckets)
        assert wire.plan().bytes_sent == sent, "exact once the buckets are known"
        assert abs(before.bytes_sent - sent) <= 8 * 64


def test_a_plan_tells_routes_and_bytes(two_ranks):
    two_ranks.run(check_plan)


def check_plan_of_low_rank(rank):
    model = small_model()
    with gradwire.attach(model, "route(*.bias=fp32; *=powersgd:rank=1,start=0)") as wire:
        for step in range(4):
            backward(model, step)
        sent = sum(bucket.bytes_sent for bucket in wire.stats().steps[-1].buckets)
        assert wire.plan().bytes_sent == sent


def test_a_plan_tells_the_bytes_of_low_rank(two_ranks):
    two_ranks.run(check_plan_of_low_rank)


def check_selectors(rank):
    by_size = {"ndim<2": "fp32", "(*, 30) & numel>=900": "int4", "numel<=60": "bf16", "0.*": "int8"}
    model = small_model()
    with gradwire.attach(model, gradwire.route(by_size)) as wire:
        planned = {route.recipe: route.parameters for route in wire.plan().routes}
        assert planned == {
            "ndim<2=fp32": ("0.bias", "2.bias", "4.bias", "5.bias"),
            "(*, 30) & numel>=900=int4": ("2.weight", "4.weight"),
            "numel<=60=bf16": ("5.weight",),
            "0.*=int8": ("0.weight",),
        }


def test_routes_select_by_size_and_shape(two_ranks):
    two_ranks.run(check_selectors)


UNFIT = {
    "route(norm*=fp32; *=int4)": "no parameter goes by the route 'norm",
    "route(*.bias=fp32)": "no route fits parameter",
    "route(numel>900=int8; *=fp32)": "no parameter goes by the route 'numel>900'",
    "route(ndim<=1=fp32)": r"no route fits parameter '0.weight' of shape \(30, 10\)",
}


def check_unfit(rank, spec):
    model = small_model()
    with gradwire.attach(model, "fp32") as wire:
        with pytest.raises(ValueError, match=UNFIT[spec]):
            wire.swap(spec)
        backward(model)


@pytest.mark.parametrize("spec", UNFIT)
def test_a_route_that_does_not_fit_the_model_is_refused(spec, two_ranks):
    two_ranks.run(check_unfit, spec)


def check_handover(rank):
    model = small_model()
    with gradwire.attach(model, "int4") as wire:  # what it holds back goes several ways
        swaps = {3: CHOSEN, 5: "route(*.weight=fp32; *=schedule(0=fp32; 7=int4))"}
        check_nothing_is_lost(wire, model, swaps)


def test_nothing_is_lost_when_routes_take_over(two_ranks):
    two_ranks.run(check_handover)


def test_a_route_is_a_recipe_like_any_other():
    chosen = gradwire.route({"*.norm*": "fp32", "*": "int4:block=64,feedback=false"})
    assert gradwire.recipe(str(chosen)) == chosen == pickle.loads(pickle.dumps(chosen))
    assert hash(gradwire.recipe(str(chosen))) == hash(chosen)
    by_size = gradwire.route({"numel<=64": "fp32", "a.* & ndim >= 2": "int4:block=64", "(500, *)": "bf16"})
    assert gradwire.recipe(str(by_size)) == by_size
    by_step = gradwire.schedule({0: "int8", 500: "sign:block=256"})
    nested = gradwire.route({"(500, *)": by_step, "ndim<=1": "fp32", "*": by_step})
    assert gradwire.recipe(str(nested)) == nested == pickle.loads(pickle.dumps(nested))
    assert gradwire.recipe(f" {by_step} ".join(["route((500,*) =", ";ndim<=1=fp32;*=", ")"])).exchange


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({}, "at least one pattern"),
        ({"*": "fp61"}, "there is no recipe 'fp61'"),
        ({"a": "fp32", "*": "fp16:reduction=sum"}, "must reduce alike"),
        ({"a": "fp32", "*": "route(*=fp32)"}, r"route '\*' is a route itself: route\(\*=fp32\)"),
        ({"a(": "fp32"}, "must close the parentheses that it opens"),
        ({"a=b": "fp32"}, "no '='"),
        ({"a;b": "fp32"}, "no ';'"),
        ({"depth<2": "fp32"}, "ndim or numel with a number, as in 'ndim<2', not 'depth<2'"),
        ({"numel<64k": "fp32"}, "not 'numel<64k'"),
        ({"numel>=_1": "fp32"}, "not 'numel>=_1'"),
        ({"numel>=1__0": "fp32"}, "not 'numel>=1__0'"),
        ({"ndim<²": "fp32"}, "not 'ndim<²'"),
        ({"(², *)": "fp32"}, "numbers and '\\*', .* not '\\(², \\*\\)'"),
        ({"(_1, *)": "fp32"}, "numbers and '\\*'"),
        ({"a & ": "fp32"}, "an empty pattern"),
        ({"(3, n)": "fp32"}, "numbers and '*'"),
        ({"(3, 4": "fp32"}, "numbers and '*'"),
    ],
)
def test_a_route_that_cannot_be_is_refused(routes, message):
    with pytest.raises(ValueError, match=message):
        gradwire.route(routes)
    with pytest.raises(
        ValueError,
        match=r"or a route itself: route\(a=schedule\(0=fp32; 5=int8\); \*=fp32\)",
    ):
        gradwire.recipe("schedule(0=route(a=schedule(0=fp32; 5=int8); *=fp32); 9=fp32)")


def test_numbers_may_have_underscores_between_their_digits():
    slot = Slot("embed.weight", 0, torch.Size([50_257, 20]), (20, 1))
    assert Selector("numel>=1_000_000").fits(slot)
    assert not Selector("numel<1_005_140").fits(slot)
    assert Selector("(50_257, *)").fits(slot)
    assert Selector("(050257, 20)").fits(slot)
    assert not Selector("(50_257,)").fits(slot)


def test_a_plan_is_of_one_stage_of_all_schedules():
    slots = Slot("a", 0, torch.Size([64, 64]), (64, 1)), Slot("b", 64 * 64, torch.Size([64, 64]), (64, 1))
    layouts = [BucketLayout(0, torch.float32, slots)]

    def planned(spec, step=None):
        plan = make_plan(gradwire.recipe(spec), layouts, 0, 2, step)
        return [route.bytes_sent for route in plan.routes]

    int4, sign = planned("int4")[0], planned("sign")[0]
    assert planned("schedule(0=sign; 5=int4)") == planned("schedule(0=sign; 5=int4)", 5) == [int4]
    assert planned("schedule(0=sign; 5=int4)", 4) == [sign]
    # That of low rank is by shapes, not as of one vector.
    assert planned("schedule(0=sign; 5=powersgd:rank=1)") == [sign]
    assert planned("schedule(0=sign; 5=powersgd:rank=1)", 5) == planned("powersgd:rank=1") != [sign]
    whole, packed = planned("route(a=fp32; b=int4)")
    crossing = "route(a=schedule(0=fp32; 5=int4); b=schedule(0=int4; 7=int8))"
    assert planned(crossing) == planned(crossing, 0) == [whole, packed], "not the most of each"
    assert planned(crossing, 5) == [packed, packed]
