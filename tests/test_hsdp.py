"""Replicas of a sharded model (HSDP): torch reduces shards, and a recipe averages them over replicas."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradwire
from tests import site_runs
from tests.logs import logged
from tests.sharded_runs import (
    attached,
    batch,
    exact_gradients,
    full_gradients,
    largest_local,
    loss_of,
    make,
    mesh_of,
    require_near,
    require_within,
    same_bits,
    shard,
    world,
)

# Each with the largest error of an average, relative to the largest gradient; None for low rank, of which
# only what is sent and what is held back together are known.
TOLERANCES = {
    "fp32": 1e-6,
    "int8": 2.02 / 254,
    "int4": None,
    "powersgd:rank=2": None,
    "bf16": 2.0**-7,
    "acp:rank=2": None,
    "sign": 2.0,
    "route(ndim<2=fp32; embed.*=int8; *=powersgd:rank=1)": None,
}
FIRST = ("powersgd:rank=2",)
SPECS = [spec if spec in FIRST else pytest.param(spec, marks=pytest.mark.full) for spec in TOLERANCES]


def residuals_of(wire):
    """Return what this rank holds back, by parameter."""
    (states,) = wire.state_dict()["memory"].values()
    kept = [own for key, own in states.items() if key.startswith("residual")]
    return {name: tensor.float() for own in kept for name, tensor in own.items()}


def check_recipe(rank, spec, tolerance, native, options):
    plain = make()
    model, wire = attached(spec, native, options)
    sent = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    due = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for step in range(3):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        have, want = full_gradients(model), exact_gradients(plain, step, world())
        largest = largest_local(plain, step, world())
        for name, exact in want.items():
            sent[name] += have[name].float()
            due[name] += exact
            error = float((have[name].float() - exact).abs().max())
            assert tolerance is None or error <= tolerance * largest + 1e-6, (name, error)
        everyone = [None] * world()
        dist.all_gather_object(everyone, {name: p.grad.to_local() for name, p in model.named_parameters()})
        assert same_bits(everyone[0], everyone[2]), "replicas differ"
        assert same_bits(everyone[1], everyone[3]), "replicas differ"
    held = residuals_of(wire)
    parameters = dict(model.named_parameters())
    for name, left in sorted(held.items()):
        # Conservation, shard by shard: gradients are what was sent and what both replicas hold back.
        dist.all_reduce(left, group=wire._attachment.group)
        own = parameters[name].grad.to_local().shape
        half = left.flatten()[: own.numel()].view(own) / 2
        missing = torch.chunk(due[name] - sent[name], 2, dim=0)[rank % 2]
        assert (missing - half).abs().max() <= 1e-4, name
    assert (tolerance is not None) or held
    if tolerance is not None:
        have, want = (torch.cat([g.flatten() for g in each.values()]) for each in (sent, due))
        assert torch.cosine_similarity(have, want, dim=0) > 0.5, "zeros would not pass"
    planned = sum(wire.plan(step=step).bytes_sent for step in range(3))  # acp alternates
    assert wire.stats().bytes_sent == planned + 24 * 3 * 3
    wire.detach()
    if native:
        model.zero_grad()
        loss_of(model, batch(rank, 0)).backward()  # by torch again
        require_near(full_gradients(model), exact_gradients(plain, 0, world()), 1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_replicas_are_averaged_by_every_recipe(spec, four_ranks):
    four_ranks.run(check_recipe, spec, TOLERANCES[spec], False, {})


@pytest.mark.parametrize(
    "spec", ["int4", *(pytest.param(spec, marks=pytest.mark.full) for spec in TOLERANCES if spec != "int4")]
)
def test_a_mesh_of_two_dimensions_is_taken_over_and_given_back(spec, four_ranks):
    four_ranks.run(check_recipe, spec, TOLERANCES[spec], True, {})


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.full
@pytest.mark.parametrize("reshards", [False, True])
def test_torchs_options_go_with_replicas(reshards, native, four_ranks):
    four_ranks.run(check_recipe, "fp32", 1e-6, native, {"reshard_after_forward": reshards})


def check_mixed_precision(rank, native):
    """Compare with torch's own HSDP in the same precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make(), mesh_of(2, 2), mp_policy=policy)
    loss_of(model, batch(rank, 0)).backward()
    want = full_gradients(model)
    model, wire = attached("fp32", native, {"mp_policy": policy})
    loss_of(model, batch(rank, 0)).backward()
    require_near(full_gradients(model), want, 1e-4)
    wire.detach()


@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.full), True])
def test_mixed_precision_goes_with_replicas(native, four_ranks):
    four_ranks.run(check_mixed_precision, native)


def check_accumulation(rank, native):
    """Only the last micro-batch is averaged, with all that has been accumulated."""
    plain = make()
    model, wire = attached("fp32", native)
    for step in range(2):
        model.zero_grad()
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            loss_of(model, batch(rank, step + 100 * micro)).backward()
        require_near(full_gradients(model), exact_gradients(plain, step, world(), num_micro=3), 1e-4)
    assert wire.stats().num_steps == 2
    assert wire.stats().bytes_sent == 2 * (wire.plan().bytes_sent + 24 * 3)
    wire.detach()


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.full)])
def test_only_the_last_micro_batch_is_averaged(native, four_ranks):
    four_ranks.run(check_accumulation, native)


def check_scaler(rank, native):
    with logged() as texts:
        for given in (False, True):
            scaler = torch.amp.GradScaler("cpu")
            model, wire = attached("int4", native, grad_scaler=scaler if given else None)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                scaler.scale(loss_of(model, batch(rank, step))).backward()
                scaler.step(optimizer)
                scaler.update()
            wire.detach()
            scaler.scale(loss_of(model, batch(rank, 2))).backward()
            scaler.step(optimizer)
    assert len(texts) == 1, texts
    assert texts[0].startswith(f"rank {rank}: a GradScaler scales the loss, and int4 was not given it")


@pytest.mark.parametrize("native", [False, True])
def test_a_scaler_that_a_wire_of_replicas_was_not_given_is_told_once(native, four_ranks):
    four_ranks.run(check_scaler, native)


def check_new_parameters(rank):
    """Parameters that are unfrozen, or replaced by those of a checkpoint, are averaged from then on."""
    mesh = mesh_of(2, 2)
    model, plain = shard(make(), mesh), make()
    frozen = [*model.blocks[0].parameters(), model.head.weight]
    for each in frozen:
        each.requires_grad_(False)
    with gradwire.attach(model, "bf16") as wire:
        loss_of(model, batch(rank, 0)).backward()
        assert all(each.grad is None for each in frozen)
        for each in frozen:
            each.requires_grad_(True)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, batch(rank, 1)).backward()
            require_within(model, plain, 1, 1e-2)
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(saved, assign=True)
        assert wire.stats().num_steps == 3
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
    dist.barrier()


def test_parameters_that_are_unfrozen_or_replaced_are_averaged(four_ranks):
    four_ranks.run(check_new_parameters)


def check_divisor(rank):
    plain = make()
    for native in (False, True):
        model, wire = attached("fp32", native)
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(2.0)  # the shards: Gloo takes no other factor
        for micro in range(2):  # sums that are averaged already stay as they are
            loss_of(model, batch(rank, 100 * micro)).backward()
        want = {name: 2 * g for name, g in exact_gradients(plain, 0, world(), num_micro=2).items()}
        require_near(full_gradients(model), want, 1e-4)
        wire.detach()


def check_disabled_divisor(rank):
    os.environ["GRADWIRE_DISABLE"] = "1"
    try:
        plain = make()
        model, _ = attached("sign", False)
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(2.0)
        loss_of(model, batch(rank, 0)).backward()
        want = {name: 2 * g for name, g in exact_gradients(plain, 0, world()).items()}
        require_near(full_gradients(model), want, 1e-4)
    finally:
        del os.environ["GRADWIRE_DISABLE"]


def check_disabled_again(rank):
    """A wire that is disabled averages named replicas until it is detached; then another can be attached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_DISABLE", "1")
        plain, (model, wire) = make(), attached("sign", False)
        wire.detach()
        with gradwire.attach(model, "sign", replicas=mesh_of(2, 2)["replicate"]):
            loss_of(model, batch(rank, 0)).backward()
            require_near(full_gradients(model), exact_gradients(plain, 0, world()), 1e-4)
    with gradwire.attach(model, "fp32", replicas=mesh_of(2, 2)["replicate"]) as wire:
        loss_of(model, batch(rank, 1)).backward()
        assert wire.stats().num_steps == 1


def test_a_disabled_wire_can_be_detached(four_ranks):
    four_ranks.run(check_disabled_again)


def test_a_divisor_divides_sums_when_gradwire_is_disabled(four_ranks):
    four_ranks.run(check_disabled_divisor)


def test_a_divisor_divides_the_sum_over_all_ranks(four_ranks):
    four_ranks.run(check_divisor)


def check_failure(rank):
    """An error of one rank reaches those that hold other shards too."""
    model, wire = attached("int8", False)
    loss_of(model, batch(rank, 0)).backward()
    if rank == 3:
        wire._attachment.engine.start = None  # any error inside
    for _ in range(2):
        with pytest.raises(gradwire.WireError) as caught:
            loss_of(model, batch(rank, 1)).backward()
        assert "rank 3, step 1" in str(caught.value)
    assert wire.failure is not None
    wire.detach()
    dist.barrier()


def test_an_error_of_one_rank_reaches_all(four_ranks):
    four_ranks.run(check_failure)


def check_all_or_none(rank):
    """What one rank cannot do, none does, and errors name ranks of the world."""
    model, wire = attached("int8", False)
    loss_of(model, batch(rank, 0)).backward()
    state = wire.state_dict()
    with pytest.raises(ValueError, match="no state of a wire"):
        wire.load_state_dict({} if rank == 3 else {**state, "step": 7})
    for other in ("int4", "nonsense"):
        with pytest.raises(ValueError, match="on rank.* 3" if rank == 1 else "int4|nonsense"):
            wire.swap(other if rank == 3 else "bf16")
    loss_of(model, batch(rank, 1)).backward()
    assert (wire.recipe.name, wire.state_dict()["step"]) == ("int8", 2)
    wire.detach()
    dist.barrier()


def test_a_state_or_a_recipe_is_taken_by_all_ranks_or_by_none(four_ranks):
    four_ranks.run(check_all_or_none)


def check_checks(rank):
    telemetry = gradwire.Telemetry(every=1)
    model, wire = attached("int8", True, verify_every=1, on_nonfinite="skip", telemetry=telemetry)
    loss_of(model, batch(rank, 0)).backward()
    errors = {each.name: each.relative_error for each in wire.stats().parameters}
    assert errors.keys() == dict(model.named_parameters()).keys()
    assert all(0 < error < 0.2 for error in errors.values())
    model.zero_grad()
    loss = loss_of(model, batch(rank, 0))
    (loss * (float("inf") if rank == 2 else 1.0)).backward()
    assert all(p.grad is None for p in model.parameters())
    assert wire.stats().num_skipped == 1
    # A gradient that is changed after it was averaged is found.
    parameter = model.blocks[0].up.weight
    before = wire._attachment.bridge.checks.verification
    hashes = before.hashes

    def changed(*, shadow):
        if rank == 1:
            parameter.grad.to_local()[0, 0] += 1
        return hashes(shadow=shadow)

    before.hashes = changed
    found = r"blocks.0.up.weight is not the same on every rank: one on rank\(s\) 1, another on rank\(s\) 3"
    with pytest.raises(gradwire.WireError, match=found):
        loss_of(model, batch(rank, 0)).backward()  # on the ranks that hold other shards too
    wire.detach()
    dist.barrier()


def test_replicas_are_verified_and_measured(four_ranks):
    four_ranks.run(check_checks)


def test_local_sgd_averages_shards_to_the_bits_of_whole_models(four_ranks):
    four_ranks.run(site_runs.check_bits, "fp32", gradwire.DiLoCo(fragments=3, delay=1), True)


def check_refusals(rank):
    mesh = mesh_of(2, 2)
    model = shard(make(), mesh["shard"])
    with pytest.raises(TypeError, match="mesh\\['replicate'\\]"):
        gradwire.attach(model, "int8", replicas=mesh)
    for others in (mesh["shard"], dist.group.WORLD):  # which hold other shards
        with pytest.raises(ValueError, match="ranks that hold the same one, .* is 0 of 2 on rank"):
            gradwire.attach(model, "int8", replicas=others)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    if rank in (0, 1):  # which hold the shards of one replica, so that no other waits
        with pytest.raises(ValueError, match="not in the group that it gives as replicas="):
            gradwire.attach(model, "int8", replicas=pairs[1 - rank])
    with pytest.raises(ValueError, match="int4 on rank|failed on rank"):
        gradwire.attach(model, "int4" if rank == 1 else "int8", replicas=mesh["replicate"])
    parameter = next(model.parameters())
    hook = parameter.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="register_post_accumulate_grad_hook"):
        gradwire.attach(model, "int8", replicas=mesh["replicate"])
    hook.remove()
    dist.barrier()


def test_what_does_not_work_is_refused(four_ranks):
    four_ranks.run(check_refusals)
