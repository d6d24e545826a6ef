"""`wrap`: a model whose buckets suit its recipe, and what `attach` says of buckets that do not."""

import functools
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp import bucket_size, ddp_attachment_of
from gradwire.links import parse_rate
from tests.models import backward, gradients


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 2))


def cap_mb(model):
    return model._get_ddp_logging_data()["bucket_cap_bytes"] / 2**20


def check_wrapped_model(rank):
    plain = DistributedDataParallel(net())
    with gradwire.attach(plain, "int4"):
        backward(plain)
        expected = gradients(plain)
    model, wire = gradwire.wrap(net(), "int4")
    with wire:
        backward(model)
        assert wire.model is model
        assert wire.stats().bytes_sent > 0
    # One bucket in both, so the same blocks and the same bits.
    assert torch.equal(gradients(model), expected)
    assert model.gradient_as_bucket_view


def test_a_wrapped_model_is_averaged_by_its_recipe(two_ranks):
    two_ranks.run(check_wrapped_model)


def check_buckets(rank):
    for recipe, size_mb in (("int8", 8), ("bf16", 8), ("fp32", 8), ("int4", 25), ("powersgd:rank=1", 25)):
        model, wire = gradwire.wrap(nn.Linear(64, 64), recipe)
        wire.detach()
        assert cap_mb(model) == size_mb, recipe
    model, wire = gradwire.wrap(net(), allreduce_hook, state=dist.group.WORLD)
    with wire:
        backward(model)
        assert cap_mb(model) == 25


def test_the_buckets_suit_the_recipe(two_ranks):
    two_ranks.run(check_buckets)


def check_links(rank):
    for recipe, options, size_mb in (
        ("sign", {}, 25),
        ("sign", {"link": "100mbit"}, 8),
        ("sign", {"link": "1gbit"}, 25),
        ("sign", {"link": "100mbit", "bucket_cap_mb": 3}, 3),
        (allreduce_hook, {"link": "100mbit", "state": dist.group.WORLD}, 25),
    ):
        model, wire = gradwire.wrap(nn.Linear(512, 512), recipe, **options)
        wire.detach()
        assert cap_mb(model) == size_mb, (recipe, options)


def test_the_buckets_suit_the_link(two_ranks):
    two_ranks.run(check_links)


def best_mb(recipe, module, link=None):
    bits_per_s = None if link is None else parse_rate(link)
    return bucket_size.best_bucket_mb(gradwire.recipe(recipe), module, module.parameters(), bits_per_s)


@pytest.mark.parametrize(
    ("link", "small", "large"),
    [
        (None, ["fp32", "bf16", "int8"], ["int4", "int2", "sign", "powersgd", "topk"]),
        ("10gbit", [], ["fp32", "bf16", "int8", "int4", "sign", "powersgd"]),
        ("5gbit", ["fp32"], ["bf16", "int8", "int4", "sign", "powersgd"]),
        ("2500mbit", ["fp32", "bf16"], ["int8", "int4", "sign", "powersgd"]),
        ("1gbit", ["fp32", "bf16", "int8"], ["int4", "int2", "sign", "powersgd", "topk"]),
        ("500 Mbit/s", ["fp32", "int8", "int4"], ["int2", "sign", "powersgd", "topk"]),
        ("100mbit", ["int4", "int2", "sign", "sign:rotated=false"], ["powersgd:rank=1", "topk"]),
        ("10mbit", ["int4", "sign", "powersgd:rank=1", "topk"], []),
    ],
)
def test_the_slower_the_link_the_fewer_bytes_are_enough_for_small_buckets(link, small, large):
    module = nn.Linear(512, 512)
    assert {recipe: best_mb(recipe, module, link) for recipe in small} == dict.fromkeys(small, 8)
    assert {recipe: best_mb(recipe, module, link) for recipe in large} == dict.fromkeys(large)


def test_buckets_go_by_what_leaves_a_node():
    module = nn.Linear(512, 512)
    assert best_mb("int8:local_size=4", module) == 8
    assert best_mb("sign:local_size=4", module) is None
    assert best_mb("sign:local_size=4", module, "100mbit") == 8
    assert best_mb("route(ndim<2=fp32; *=sign:local_size=4)", module) is None
    assert best_mb("noop", module, "64kbit") is None


def test_a_model_whose_parameters_have_no_values_keeps_the_buckets_of_ddp():
    assert best_mb("fp32", nn.ParameterList([torch.zeros(0, 4)])) is None


def test_buckets_go_by_the_recipe_for_tables_too():
    module = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64))
    assert best_mb("sign", module) is None
    assert best_mb("sign:tables=fp32", module) == 8


def check_refusals(rank):
    with pytest.raises(ValueError, match="a rate is a number and kbit, mbit or gbit, .* not 'fast'"):
        gradwire.wrap(net(), "sign", link="fast")
    with pytest.raises(TypeError, match="a rate is text, such as '100mbit', not 100"):
        gradwire.wrap(net(), "sign", link=100)
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not type"):
        gradwire.wrap(nn.Linear, "sign")
    for option, text in {
        "verify_evry": "takes verify_evry= here; did you mean verify_every=",
        "bucket_cap": "takes bucket_cap= here; did you mean bucket_cap_mb=",
        "replicas": "neither DistributedDataParallel nor gradwire.attach takes replicas= here",
    }.items():
        with pytest.raises(TypeError, match=text):
            gradwire.wrap(net(), "sign", **{option: 1})
    for model in (DistributedDataParallel(net()), torch.compile(DistributedDataParallel(net()))):
        with pytest.raises(TypeError, match="give it the module inside, or attach to this one"):
            gradwire.wrap(model, "sign")


def test_what_cannot_be_wrapped_is_refused(two_ranks):
    two_ranks.run(check_refusals)


def check_options(rank):
    group = dist.new_group()
    model, wire = gradwire.wrap(
        net(),
        gradwire.recipe("fp16"),
        bucket_cap_mb=3,
        gradient_as_bucket_view=False,
        find_unused_parameters=True,
        process_group=group,
        on_nonfinite="raise",
    )
    with wire:
        assert cap_mb(model) == 3
        assert (model.gradient_as_bucket_view, model.find_unused_parameters) == (False, True)
        assert model.process_group is group
        assert ddp_attachment_of(wire).checks_nonfinite
    with pytest.raises(TypeError, match="bucket_cap"):
        gradwire.wrap(net(), "fp16", bucket_cap=3)


def test_options_go_to_ddp_and_to_attach(two_ranks):
    two_ranks.run(check_options)


def logged_by(log, attach):
    """Return what ``attach`` logs about buckets."""
    log.clear()
    with log.at_level(logging.INFO, "gradwire"), attach():
        return [each.getMessage() for each in log.records if "buckets" in each.getMessage()]


def test_buckets_that_are_too_large_are_told_once(caplog):
    bucket_size._log_once.cache_clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        large = functools.partial(nn.Linear, 2100, 2100)
        model = DistributedDataParallel(large())
        first, second = (logged_by(caplog, lambda: gradwire.attach(model, "int8")) for _ in range(2))
        assert ["gradwire.wrap(module, 'int8')" in text for text in first] == [True]
        assert not second
        small, fits = DistributedDataParallel(net()), DistributedDataParallel(large(), bucket_cap_mb=8)
        for other, recipe in ((small, "int8"), (fits, "int8"), (model, "int4"), (model, "noop")):
            assert not logged_by(caplog, lambda other=other, recipe=recipe: gradwire.attach(other, recipe))
        assert not logged_by(caplog, lambda: gradwire.wrap(large(), "int8")[1])
    finally:
        dist.destroy_process_group()


def check_sharded(rank):
    model = net()
    fully_shard(model)
    with pytest.raises(TypeError, match=r"fully_shard has sharded this model: call gradwire\.attach"):
        gradwire.wrap(model, "int8")


def test_a_sharded_model_is_left_to_attach(two_ranks):
    two_ranks.run(check_sharded)
