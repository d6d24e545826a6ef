"""Recipes: names, options, errors."""

import pickle
import re

import pytest
import torch
from torch.distributed.algorithms import ddp_comm_hooks as torch_hooks

import gradwire
from gradwire.codecs import Rotated
from gradwire.ddp_comm_hooks import DDPCommHookType
from tests.rows import ROWS


def test_every_recipe_has_a_row():
    assert {row.spec.partition(":")[0] for row in ROWS} == set(gradwire.RECIPES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.spec)
def test_a_recipe_is_a_value(row):
    recipe = gradwire.recipe(row.spec)
    assert recipe == gradwire.recipe(row.spec)
    assert hash(recipe) == hash(gradwire.recipe(row.spec))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert str(recipe) == row.spec
    assert gradwire.recipe(str(recipe)) == recipe
    assert gradwire.recipe(recipe) is recipe


def test_a_block_of_the_default_size_makes_no_other_recipe():
    for spec, same in (
        ("int4", "int4:block=128"),
        ("int4:rotated=true", "int4:block=1024,rotated=true"),
        ("sign", "sign:block=1024"),
        ("sign:rotated=false", "sign:block=512,rotated=false"),
    ):
        assert gradwire.recipe(same) == gradwire.recipe(spec)
        assert str(gradwire.recipe(same)) == spec
    assert gradwire.recipe("int4:block=1024") != gradwire.recipe("int4")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp61", "there is no recipe 'fp61'; did you mean 'fp16'"),
        ("BF16", "did you mean 'bf16'"),
        ("zzzzzz", r"there is no recipe 'zzzzzz'\. Recipes: noop, fp32, fp16, bf16"),
        ("", "there is no recipe ''"),
        ("fp16:reduction=max", "option 'reduction' must be mean or sum, not 'max'"),
        ("fp16:block=3", "recipe 'fp16' has no option 'block'; it has reduction"),
        ("noop:x=1", "recipe 'noop' has no option 'x'; it has none"),
        ("fp16:reduction", "'reduction' is not of the form option=value"),
        ("fp16:reduction=sum,reduction=mean", "option 'reduction' is given twice"),
        ("int8:block=3", "^recipe 'int8:block=3': block must be a power of two from 32 to 4096, not 3$"),
        ("route(ndim<2=fp32; *=powersgd:rank=0)", "^recipe 'powersgd:rank=0': rank must be at least 1"),
        (
            "int4:rotated=true,rounding=stochastic",
            "^recipe .*: rotated values are rounded to the nearest level",
        ),
        ("int8:block=1e3", "recipe 'int8': option 'block' must be a whole number, not '1e3'"),
        ("int4:rotated=true,block=64", "block must be a power of two from 128 to 4096, not 64"),
        ("sign:rotated=false,block=16", "block must be a power of two from 32 to 4096, not 16"),
        ("int2:bits=2+1", r"recipe 'int2': option 'bits' must be 1\+2 or 2\+2, not '2\+1'"),
        ("auto:budget=2", "^recipe 'auto:budget=2': budget is a relative error between 0 and 1, not 2.0$"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(spec, message):
    with pytest.raises(ValueError, match=message):
        gradwire.recipe(spec)


@pytest.mark.parametrize(
    ("name", "option", "value", "wanted"),
    [
        ("int8", "feedback", "no", "True or False"),  # a text is true
        ("int8", "local_size", "2", "a whole number"),
        ("int8", "local_size", True, "a whole number"),
        ("int8", "block", 64.0, "a whole number"),
        ("topk", "keep", "16", "a whole number"),
        ("int2", "seed", 1.5, "a whole number"),
        ("int4", "momentum", "0.9", "a number"),
        ("powersgd", "rank", 2.5, "a whole number"),
        ("acp", "start", None, "a whole number"),
        ("auto", "budget", "0.1", "a number"),
        ("auto", "every", 2.5, "a whole number"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused(name, option, value, wanted):
    with pytest.raises(TypeError, match=f"^recipe '{name}': {option} must be {wanted}, not {value!r}$"):
        getattr(gradwire, name)(**{option: value})


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("POWERSGD:rank=2", "powersgd:rank=2"),
        ("int4(block=64)", "int4:block=64"),
        ("int4 block=64", "int4:block=64"),
        ("route(*=int4:block=64", "route(*=int4:block=64)"),
        ("schedule(0=fp32; 9=int8))", "schedule(0=fp32; 9=int8)"),
        ("route(ndim<2=fp32; *=schedule(0=int8; 9=int4)", "route(ndim<2=fp32; *=schedule(0=int8; 9=int4))"),
        ("Schedule[0=fp32]", "schedule(0=fp32)"),
        ("schedule:0=fp32", "schedule(0=fp32)"),
        ("schedule(0=fp32, 9=int8)", "schedule(0=fp32; 9=int8)"),
        ("schedule(0=fp32; 9=int88)", "int8"),
        ("top-k", "topk"),
        ("Power SGD", "powersgd"),
        ("topk-1%", "topk"),
        ("int8,int4", "int8' or 'int4"),
    ],
)
def test_the_nearest_correct_spelling_is_suggested(spec, meant):
    assert all(gradwire.recipe(each) for each in meant.split("' or '"))
    with pytest.raises(ValueError, match="did you mean") as caught:
        gradwire.recipe(spec)
    text = str(caught.value)
    assert f"did you mean '{meant}'" in text
    assert text.endswith(
        "powersgd, acp, auto; composed of these, schedule(0=fp32; 1000=int8) and route(ndim<2=fp32; *=int4)"
    )


@pytest.mark.parametrize(
    ("name", "ours"),
    {
        "allreduce": "fp32",
        "8bit": "int8",
        "QSGD": "int8:rounding=stochastic",
        "fp4": "int4",
        "terngrad": "int2",
        "1-bit": "sign",
        "onebit": "sign",
        "schedule(0=none; 9=1bit)": "fp32",
    }.items(),
)
def test_a_name_that_others_use_suggests_the_recipe_that_does_the_same(name, ours):
    with pytest.raises(ValueError, match=re.escape(f"; did you mean {ours!r}? Recipes: ")):
        gradwire.recipe(name)


def test_a_missing_parenthesis_is_counted_and_what_would_not_help_is_not_suggested():
    for spec, what in {
        "schedule(0=fp32": "recipe 'schedule(0=fp32' has 1 '(' and 0 ')'; did",
        "route((50257, *=int4; *=fp32)": "has 2 '(' and 1 ')'. Recipes: noop",
        "schedule(0=fp32)) and)": "has 1 '(' and 3 ')'. Recipes: noop",
    }.items():
        with pytest.raises(ValueError, match=re.escape(what)):
            gradwire.recipe(spec)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "int, 3"),
        (None, "None; 'fp32' averages as DDP does by itself"),
        (
            {0: "fp32"},
            "dict, {0: 'fp32'}; a recipe by step or by parameter is gradwire.schedule({0: 'fp32'})",
        ),
        ({"*": "int4"}, "gradwire.route({'*': 'int4'})"),
        (
            DDPCommHookType.INT4,
            "DDPCommHookType, DDPCommHookType.INT4; did you mean 'int4'? register_ddp_comm_hook",
        ),
        (torch_hooks.DDPCommHookType.BF16_COMPRESS, "did you mean 'bf16'?"),
        (
            torch_hooks.DDPCommHookType.ALLREDUCE,
            "ALLREDUCE; did you mean 'fp32'? register_ddp_comm_hook of gradwire.ddp_comm_hooks takes",
        ),
        (torch.bfloat16, "dtype, torch.bfloat16; did you mean 'bf16'"),
        (gradwire.bf16, "a function, bf16; call it: bf16(...)"),
        (DDPCommHookType, "a class, DDPCommHookType"),
        (torch.nn.Linear(2, 2), "a model, Linear"),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_what_is_no_recipe_is_refused_with_the_way_to_one(given, message):
    expected = "a recipe is text, such as 'int4' or 'int4:block=64', or a gradwire.Recipe, not "
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}.*{re.escape(message)}"):
        gradwire.recipe(given)


def test_routes_and_schedules_are_dicts():
    for make, example in {gradwire.route: '{"ndim<2": "fp32"', gradwire.schedule: '{0: "fp32"'}.items():
        with pytest.raises(TypeError, match=f"takes a dict, such as {re.escape(example)}.*, not list"):
            make(["int8", "int4"])


@pytest.mark.parametrize("name", ["powersgd", "acp"])
def test_low_rank_has_as_many_directions_as_rank_4_in_fp32_has_bytes_for_unless_told_a_rank(name):
    def chosen(options):
        exchange = gradwire.recipe(f"{name}:{options}").exchange
        return exchange.rank, exchange.factors and exchange.factors.wire_bytes(1024) * 8 // 1024

    assert chosen("") == chosen("rank=32,factors=int4") == (32, 4)
    assert chosen("factors=int8") == (16, 8)
    assert chosen("factors=int2") == (64, 2)
    assert chosen("factors=fp32") == chosen("rank=4") == (4, None)
    assert chosen("rank=7,factors=int8") == (7, 8)


def test_a_reduction_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', not 'max'"):
        gradwire.fp32(reduction="max")


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if 3 in row.world_sizes and not row.exchange.sees_parameters],
    ids=lambda row: row.spec,
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("numel", [0, 1, 63, 1000, 25_000_003])
def test_no_rank_sends_much_more_than_twice_its_share(row, world_size, numel):
    recipe = gradwire.recipe(row.spec)
    most = max(recipe.wire_bytes(numel, rank=rank, world_size=world_size) for rank in range(world_size))
    whole = row.exact_bytes(numel, torch.float32)
    # A chunk is rounded up to 64 values, or its tail to a power of two, and each row may have a header.
    is_padded = isinstance(getattr(recipe.exchange, "codec", None), Rotated)
    slack = 2 * world_size * row.exact_bytes(513 if is_padded else 64, torch.float32)
    assert most <= 2 * (world_size - 1) / world_size * whole + slack
    assert (most == 0) == (world_size == 1 or whole == 0)
