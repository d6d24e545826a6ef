"""Parameters that are gathered by an encoding: all ranks compute with the same decoded weights."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.sharded_runs import (
    attached,
    batch,
    exact_gradients,
    full_gradients,
    loss_of,
    make,
    require_near,
    same_bits,
    shard,
    train,
    world,
)

# Each with the largest error of a weight, relative to the largest one.
ERRORS = {"int8": 1.01 / 254, "bf16": 2.0**-8, "int4": 1.01 / 14, "fp8": 2.0**-4, "fp16": 2.0**-11}
SPECS = ["int8", *(pytest.param(spec, marks=pytest.mark.full) for spec in ERRORS if spec != "int8")]


def computed_with(model, rank):
    """Return the weights in a forward and in a backward pass, by name; and leave gradients behind."""
    forward, backward, hooks = {}, {}, []

    def keep(seen, module, *_):
        name = next(n for n, each in model.named_modules() if each is module)
        for own, parameter in module.named_parameters(recurse=False):
            seen[f"{name}.{own}"] = parameter.detach().clone()

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            hooks.append(module.register_forward_hook(lambda m, *_: keep(forward, m)))
            hooks.append(module.register_full_backward_hook(lambda m, *_: keep(backward, m)))
    loss_of(model, batch(rank, 0)).backward()
    for hook in hooks:
        hook.remove()
    return forward, backward


def masters(model):
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def check_weights(rank, spec, error, reshards):
    model = shard(make(), reshard_after_forward=reshards)
    exact = masters(model)
    with gradwire.attach(model, "fp32", weights=spec) as wire:
        forward, backward = computed_with(model, rank)
        assert forward.keys() == exact.keys()
        for name, master in exact.items():
            far = (forward[name] - master).abs().max()
            if master.ndim == 1:
                assert far == 0, name
            else:
                assert 0 < far <= error * master.abs().max(), name
        assert {name for name in backward if "embed" not in name}
        assert all(
            torch.equal(forward[name], later) for name, later in backward.items() if "embed" not in name
        )
        everyone = [None] * world()
        dist.all_gather_object(everyone, forward)
        assert all(same_bits(forward, other) for other in everyone)
        plain = make()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(forward[name])
        require_near(full_gradients(model), exact_gradients(plain, 0, world()), 1e-4)
        assert "encoded parameters are gathered" in str(wire.plan())
    model.zero_grad()
    forward, _ = computed_with(model, rank)  # by torch again
    assert same_bits(forward, exact)


@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_compute_with_the_same_decoded_weights(spec, two_ranks):
    two_ranks.run(check_weights, spec, ERRORS[spec], True)


@pytest.mark.full
def test_weights_may_stay_whole_after_the_forward_pass(two_ranks):
    two_ranks.run(check_weights, "int8", ERRORS["int8"], False)


@pytest.mark.full
@pytest.mark.parametrize("spec", ["int8", "int4"])
def test_shards_of_three_ranks_are_encoded_each_by_itself(spec, three_ranks):
    three_ranks.run(check_weights, spec, ERRORS[spec], True)


def check_training(rank):
    """Micro-batches see the same weights, and a resumed run has the bits of one that was not stopped."""
    model = shard(make())
    with gradwire.attach(model, "int8", weights="int8"):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss_of(model, batch(rank, micro)).backward()
        model.zero_grad()
        train(model, range(3), rank)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        want = train(model, range(3, 6), rank)
    other = shard(make(seed=9))
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(weights[name])
    with gradwire.attach(other, "int8", weights="int8"):
        assert same_bits(train(other, range(3, 6), rank), want)


def test_a_resumed_run_has_the_same_bits(two_ranks):
    two_ranks.run(check_training)


def check_mixed_precision(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make(), mp_policy=policy)
    exact = masters(model)
    with gradwire.attach(model, "fp32", weights="int8"):
        forward, _ = computed_with(model, rank)
    for name, master in exact.items():
        assert forward[name].dtype == torch.bfloat16
        far = (forward[name].float() - master).abs().max()
        assert far <= (ERRORS["int8"] + 2.0**-7) * master.abs().max(), name


@pytest.mark.full
def test_weights_of_16_bits_are_encoded_too(two_ranks):
    two_ranks.run(check_mixed_precision)


def check_hsdp(rank):
    model, wire = attached("int4", True, weights="int8")
    forward, _ = computed_with(model, rank)
    everyone = [None] * world()
    dist.all_gather_object(everyone, forward)
    assert all(same_bits(forward, other) for other in everyone), "replicas differ"
    assert not same_bits(forward, masters(model))
    wire.detach()


def test_replicas_gather_the_same_weights(four_ranks):
    four_ranks.run(check_hsdp)


def check_refusals(rank):
    model = shard(make())
    for spec in ("powersgd", "sign", "int2", "noop", "int8:rounding=stochastic", "route(*=int8)", "topk"):
        with pytest.raises(ValueError, match="cannot encode parameters"):
            gradwire.attach(model, "int8", weights=spec)
    with pytest.raises(ValueError, match="weights is int8 on rank.s. 0, int4 on rank"):
        gradwire.attach(model, "int8", weights="int4" if rank else "int8")
    with pytest.raises(TypeError, match="weights= goes with a model that fully_shard"):
        gradwire.attach(DistributedDataParallel(make()), "int8", weights="int8")
    before = model._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm
    model.set_custom_all_gather(object())
    with pytest.raises(ValueError, match="all-gather of its own, object"):
        gradwire.attach(model, "int8", weights="int8")
    model.set_custom_all_gather(before)
    door = FSDPModule.set_custom_all_gather
    del FSDPModule.set_custom_all_gather  # as before torch 2.9
    try:
        with pytest.raises(ValueError, match="has no FSDPModule.set_custom_all_gather"):
            gradwire.attach(model, "int8", weights="int8")
    finally:
        FSDPModule.set_custom_all_gather = door


def test_what_cannot_encode_weights_is_refused(two_ranks):
    two_ranks.run(check_refusals)
