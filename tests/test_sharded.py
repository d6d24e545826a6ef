"""Models that ``fully_shard`` has sharded: gradients are reduced by a recipe, whatever torch does around."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire.sharded import reduce_scatter, sharing
from tests.logs import logged
from tests.sharded_runs import (
    batch,
    exact_gradients,
    full_gradients,
    largest_local,
    loss_of,
    make,
    require_near,
    require_within,
    same_bits,
    shard,
    train,
    world,
)

# Each with the largest error of one rounding, relative to the largest gradient.
TOLERANCES = {
    "fp32": 1e-6,
    "bf16": 2.0**-8,
    "int8": 1.01 / 254,
    "int4": 1.01 / 14,
    "sign": 1.0,
    "fp16": 2.0**-11,
    "fp8": 2.0**-4,
    "int3": 1.5,
    "int2": 3.0,
    "int4:rounding=stochastic": 1.01 / 7,
    "route(*.norm.*=fp32; ndim<2=bf16; *=int8)": 1.01 / 254,
}
FIRST = ("int8", "sign")
MORE = ("fp32", "bf16", *FIRST)
SPECS = [spec if spec in FIRST else pytest.param(spec, marks=pytest.mark.full) for spec in TOLERANCES]


def check_recipe(rank, spec, tolerance, options):
    plain, model = make(), shard(make(), **options)
    with gradwire.attach(model, spec) as wire:
        for step in range(2):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            require_within(model, plain, step, tolerance)
        claims = 24 * 3 * 2 * (world() - 1)  # a claim for each bucket
        assert wire.stats().bytes_sent == 2 * wire.plan(step=0).bytes_sent + claims
        assert wire.stats().num_steps == 2
        assert [len(bucket.slots) for bucket in wire.layout()] == [5, 5, 5]
    model.zero_grad()
    loss_of(model, batch(rank, 0)).backward()  # by torch again
    require_near(full_gradients(model), exact_gradients(plain, 0, world()), 1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_two_ranks_reduce_by_every_recipe(spec, two_ranks):
    two_ranks.run(check_recipe, spec, TOLERANCES[spec], {})


@pytest.mark.full
@pytest.mark.parametrize("spec", MORE)
def test_three_ranks_reduce_uneven_shards(spec, three_ranks):
    three_ranks.run(check_recipe, spec, TOLERANCES[spec], {})


@pytest.mark.full
@pytest.mark.parametrize("spec", MORE)
def test_four_ranks_reduce(spec, four_ranks):
    four_ranks.run(check_recipe, spec, TOLERANCES[spec], {})


@pytest.mark.full
def test_parameters_may_stay_whole_after_the_forward_pass(two_ranks):
    two_ranks.run(check_recipe, "int8", TOLERANCES["int8"], {"reshard_after_forward": False})


def check_late_waits(rank):
    """A block is computed while two buckets travel; the older one must end before there is a third."""
    model, events = shard(make(num_blocks=4)), []

    def noted(source, target):
        events.append("end")
        target.copy_(source)

    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda *_: events.append("backward"))
    with gradwire.attach(model, "fp32"), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(reduce_scatter, "_copy", noted)
        loss_of(model, batch(rank, 0)).backward()
    assert events == ["backward"] * 3 + ["end", "backward"] + ["end"] * 4


def test_a_block_is_computed_while_two_buckets_travel(two_ranks):
    two_ranks.run(check_late_waits)


def check_mixed_precision(rank, reduce_dtype):
    """Compare with torch's own reduction in the same precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = shard(make(), mp_policy=policy)
    loss_of(model, batch(rank, 0)).backward()
    want = full_gradients(model)
    model.zero_grad()
    with gradwire.attach(model, "int8") as wire:
        loss_of(model, batch(rank, 0)).backward()
        assert {bucket.dtype for bucket in wire.layout()} == {reduce_dtype}
        have = full_gradients(model)
    largest = largest_local(make(), 0, world())
    for name, exact in want.items():
        assert have[name].dtype == torch.float32
        assert (have[name] - exact).abs().max() <= 2 * (1.01 / 254 + 2.0**-8) * largest, name


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_precision_reduces_in_its_own_dtype(reduce_dtype, two_ranks):
    two_ranks.run(check_mixed_precision, reduce_dtype)


@pytest.mark.full
def test_cpu_offload_is_taken(two_ranks):
    two_ranks.run(
        check_recipe, "int8", TOLERANCES["int8"], {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    )


def check_accumulation(rank):
    """Micro-batches accumulate before they are reduced, or after."""
    for waits in (True, False):
        plain, model = make(), shard(make())
        with gradwire.attach(model, "fp32") as wire:
            for micro in range(3):
                model.set_requires_gradient_sync(not waits or micro == 2)
                loss_of(model, batch(rank, 100 * micro)).backward()
            want = exact_gradients(plain, 0, world(), num_micro=3)
            require_near(full_gradients(model), want, 1e-4)
            assert wire.stats().num_steps == (1 if waits else 3)


def test_micro_batches_accumulate(two_ranks):
    two_ranks.run(check_accumulation)


def check_divisors(rank):
    """Sums are divided as torch's own are; those that Gloo refuses (premultiplied ones) work too."""
    for prepare, factor in (
        (lambda m: m.set_gradient_divide_factor(1.0), world()),
        (lambda m: m.set_gradient_divide_factor(8.0), world() / 8),
        (lambda m: m.set_force_sum_reduction_for_comms(True), 1.0),
    ):
        plain, model = make(), shard(make())
        for module in (model, *model.blocks):
            prepare(module)
        with gradwire.attach(model, "fp32"):
            loss_of(model, batch(rank, 0)).backward()
            want = {name: factor * g for name, g in exact_gradients(plain, 0, world()).items()}
            require_near(full_gradients(model), want, 1e-4)


def test_gradients_are_divided_as_torch_divides_them(two_ranks):
    two_ranks.run(check_divisors)


class Sometimes(nn.Module):
    """Uses one of its layers in some steps only."""

    def __init__(self):
        super().__init__()
        self.always, self.rarely = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, *, is_rare):
        return self.rarely(self.always(x)) if is_rare else self.always(x)


def check_unused(rank):
    torch.manual_seed(0)
    model, plain = fully_shard(Sometimes()), Sometimes()
    with torch.no_grad():
        for mine, name in ((p, n) for n, p in plain.named_parameters()):
            mine.copy_(dict(model.named_parameters())[name].full_tensor())
    model.rarely.bias.requires_grad_(False)
    with gradwire.attach(model, "int8"):
        for is_rare in (False, True, False):
            model.zero_grad()
            model(torch.full((2, 8), 1.0 + rank), is_rare=is_rare).sum().backward()
            plain.zero_grad()
            for each in range(world()):
                (plain(torch.full((2, 8), 1.0 + each), is_rare=is_rare).sum() / world()).backward()
            have = full_gradients(model)
            assert ("rarely.weight" in have) == is_rare
            assert "rarely.bias" not in have
            want = dict(plain.named_parameters())
            for name, gradient in have.items():
                assert (gradient - want[name].grad).abs().max() <= 0.02 * want[name].grad.abs().max(), name
    with gradwire.attach(model, "route(*.bias=fp32; *=int8)") as wire:
        with pytest.raises(ValueError, match="parameters without a gradient"):
            model(torch.ones(2, 8), is_rare=False).sum().backward()
        assert wire.failure is not None


def test_unused_and_frozen_parameters_are_left_out(two_ranks):
    two_ranks.run(check_unused)


def check_left_out(rank):
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    fully_shard(tied[1])
    tied[1].bias.requires_grad_(False)
    with logged() as texts, gradwire.attach(tied, "int8"):
        pass
    told = [text for text in texts if "left out 3 trained parameter(s), such as 0.weight" in text]
    assert len(told) == (rank == 0), texts
    fully_shard(tied)
    with logged() as texts, gradwire.attach(tied, "int8"):
        tied(torch.ones(2, 4)).sum().backward()
    assert texts == []


def test_parameters_that_nobody_averages_are_told_once(two_ranks):
    two_ranks.run(check_left_out)


def check_clipping(rank):
    plain, model = make(), shard(make())
    with gradwire.attach(model, "fp32"):
        loss_of(model, batch(rank, 0)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    want = exact_gradients(plain, 0, world())
    exact = torch.linalg.vector_norm(torch.stack([g.norm() for g in want.values()]))
    assert torch.allclose(norm, exact, rtol=1e-4)
    require_near(full_gradients(model), {n: g * (0.1 / exact) for n, g in want.items()}, 1e-3)


def test_gradients_are_clipped_by_their_common_norm(two_ranks):
    two_ranks.run(check_clipping)


def check_checkpointing(rank, compiles, weights=None):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, model = make(), make()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = (
            torch.compile(block, backend="eager") if compiles else checkpoint_wrapper(block)
        )
    shard(model)
    with gradwire.attach(model, "int8", weights=weights):
        for _ in range(2):
            model.zero_grad()
            loss_of(model, batch(rank, 0)).backward()
        have = {
            name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): g
            for name, g in full_gradients(model).items()
        }
        want = exact_gradients(plain, 0, world())
        assert have.keys() == want.keys()
        largest = largest_local(plain, 0, world())
        for name, exact in want.items():
            assert (have[name] - exact).abs().max() <= TOLERANCES["int8"] * largest + 1e-6, name


def test_activations_may_be_computed_again(two_ranks):
    two_ranks.run(check_checkpointing, False)


@pytest.mark.full
def test_blocks_may_be_compiled(two_ranks):
    two_ranks.run(check_checkpointing, True)


@pytest.mark.full
@pytest.mark.parametrize("compiles", [False, True])
def test_such_blocks_may_be_gathered_ahead(compiles, two_ranks):
    two_ranks.run(check_checkpointing, compiles, "fp32")


def check_resume(rank):
    """A resumed run has the bits of one that was not stopped: seeds and stages follow the step."""
    spec = "schedule(0=int8; 3=int4:rounding=stochastic)"
    model = shard(make())
    with gradwire.attach(model, spec) as wire:
        train(model, range(4), rank)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        state = wire.state_dict()
        want = train(model, range(4, 7), rank)
    other = shard(make(seed=9))
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(weights[name])
    with gradwire.attach(other, spec) as wire:
        wire.load_state_dict(state)
        assert same_bits(train(other, range(4, 7), rank), want)
        assert wire.stats().num_steps == 3
        wire.swap("fp32")
        train(other, range(1), rank)
        assert str(wire.recipe) == "fp32"


def test_a_resumed_run_has_the_same_bits(two_ranks):
    two_ranks.run(check_resume)


def check_odd_texts(rank):
    ranks = SimpleNamespace(shards=dist.group.WORLD, num_shards=2, device=torch.device("cpu"))
    failure = gradwire.WireError("no file train\udcff.py") if rank else None
    assert sharing(ranks)(None) is None
    told = sharing(ranks)(failure)
    assert told is failure if rank else str(told) == "no file train\\udcff.py"


def test_shards_are_told_of_a_failure_whose_text_is_no_utf_8(two_ranks):
    two_ranks.run(check_odd_texts)


def spoiled_loss(model, rank):
    """Return a loss whose gradient is not finite in the first row of the embedding, which rank 0 holds."""
    tokens = batch(rank, 0)
    if rank != 1:
        return loss_of(model, tokens)

    def spoil(module, args, output):
        output.register_hook(lambda gradient: gradient * float("inf"))

    with model.embed.register_forward_hook(spoil):
        return loss_of(model, torch.zeros_like(tokens))


def check_nonfinite(rank):
    model = shard(make())
    with gradwire.attach(model, "int8"):
        spoiled_loss(model, rank).backward()
        assert all(p.grad.to_local().isfinite().all() for p in model.parameters()) == (rank == 1)
        model.zero_grad()
    with gradwire.attach(model, "int8", on_nonfinite="skip") as wire:
        spoiled_loss(model, rank).backward()
        assert all(p.grad is None for p in model.parameters())
        assert wire.stats().num_skipped == 1
        loss_of(model, batch(rank, 0)).backward()
        assert all(p.grad is not None for p in model.parameters())
    with gradwire.attach(model, "int8", on_nonfinite="raise"), pytest.raises(FloatingPointError):
        spoiled_loss(model, rank).backward()


def test_all_ranks_skip_a_step_of_which_one_has_a_bad_shard(two_ranks):
    two_ranks.run(check_nonfinite)


def check_failure(rank):
    """A rank that reduces other parameters than the rest makes all raise; none waits."""
    model = shard(make())
    wire = gradwire.attach(model, "int8")
    loss_of(model, batch(rank, 0)).backward()
    if rank == 0:
        model.blocks[1].up.weight.requires_grad_(False)
    for _ in range(2):
        with pytest.raises(gradwire.WireError, match="do not agree"):
            loss_of(model, batch(rank, 1)).backward()
    assert "do not agree" in str(wire.failure)
    wire.detach()
    dist.barrier()


def test_ranks_that_differ_raise_together(two_ranks):
    two_ranks.run(check_failure)


def check_refusals(rank):
    model = shard(make())
    for spec, options, match in (
        ("powersgd", {}, "whole matrices"),
        ("int8:reduction=sum", {}, "set_gradient_divide_factor"),
        ("int8:feedback=true", {}, "keeps residuals"),
        ("int8", {"verify_every": 1}, "own shard"),
        ("int8", {"telemetry": gradwire.Telemetry()}, "errors=False"),
        ("route(nothing=int8; *=fp32)", {}, "no parameter goes by"),
    ):
        with pytest.raises(ValueError, match=match):
            gradwire.attach(model, spec, **options)
    with pytest.raises(ValueError, match="int4 on rank"):
        gradwire.attach(model, "int4" if rank else "int8")
    with pytest.raises(TypeError, match="recipes only"):
        gradwire.attach(model, lambda state, bucket: None)
    with gradwire.attach(model, "int8") as wire:
        with pytest.raises(ValueError, match="already"):
            gradwire.attach(model, "int8")
        assert wire.model is model
    gradwire.attach(torch.compile(model, backend="eager"), "int8").detach()
    with pytest.raises(TypeError, match="fully_shard"):
        gradwire.attach(nn.Linear(2, 2), "int8", replicas=dist.group.WORLD)


def test_what_does_not_work_is_refused_when_it_is_attached(two_ranks):
    two_ranks.run(check_refusals)


def check_own_groups(rank):
    plain, model = make(), make()
    ranks = list(range(world()))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=DeviceMesh.from_group(dist.new_group(ranks), "cpu"))
    with gradwire.attach(model, "int8") as wire:
        loss_of(model, batch(rank, 0)).backward()
        require_within(model, plain, 0, TOLERANCES["int8"])
        assert wire.stats().bytes_sent > 0


def test_parts_may_have_groups_of_their_own_with_the_same_ranks(two_ranks):
    two_ranks.run(check_own_groups)


def check_disabled(rank):
    import os

    os.environ["GRADWIRE_DISABLE"] = "1"
    try:
        plain, model = make(), shard(make())
        wire = gradwire.attach(model, "sign")
        loss_of(model, batch(rank, 0)).backward()
        require_near(full_gradients(model), exact_gradients(plain, 0, world()), 1e-4)
        assert not wire.attached
    finally:
        del os.environ["GRADWIRE_DISABLE"]


def test_torch_reduces_when_gradwire_is_disabled(two_ranks):
    two_ranks.run(check_disabled)
