"""``verify_every`` finds gradients and parameters that are not the same on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp.verification import _hash as hash_of
from gradwire.ddp.verification import check_interval
from tests.corrupting import FIRST_WRONG_STEP, corrupting_hook, corrupting_recipe
from tests.models import backward, net


def model_of(**options):
    return DistributedDataParallel(net(), bucket_cap_mb=0.001, **options)


# --- gradients ---

CORRUPTING = {"a recipe": corrupting_recipe, "a hook": corrupting_hook}


def check_corrupted(rank, name):
    model = model_of()
    with gradwire.attach(model, CORRUPTING[name](), verify_every=2):
        for step in range(FIRST_WRONG_STEP + 1):  # step 3 is not verified
            backward(model, step)
        with pytest.raises(gradwire.WireError) as caught:
            backward(model, FIRST_WRONG_STEP + 1)
    text = str(caught.value)
    # The last bucket holds the first parameters, and the weight lies behind the bias.
    assert text.startswith(f"rank {rank}, step {FIRST_WRONG_STEP + 1}: the averaged gradient of 0."), text
    assert "is not the same on every rank: one on rank(s) 0, 2, another on rank(s) 1." in text


@pytest.mark.parametrize("name", CORRUPTING)
def test_a_gradient_that_differs_is_an_error_on_all_ranks_with_its_name(name, three_ranks):
    three_ranks.run(check_corrupted, name)


def check_corrupted_in_a_part(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    model = model_of(process_group=group)
    with gradwire.attach(model, corrupting_recipe(), verify_every=1):
        for step in range(FIRST_WRONG_STEP):
            backward(model, step)
        with pytest.raises(
            gradwire.WireError, match=r"one on rank\(s\) 1, another on rank\(s\) 2\."
        ) as caught:
            backward(model, FIRST_WRONG_STEP)
    assert str(caught.value).startswith(f"rank {rank}, step {FIRST_WRONG_STEP}: ")


def test_ranks_that_differ_are_named_as_in_the_world(three_ranks):
    three_ranks.run(check_corrupted_in_a_part)


# What is attached, and whether DDP looks for unused parameters.
SOUND = {
    "bf16": ("bf16", False),
    "a sum, with unused parameters": ("fp32:reduction=sum", True),
    "a hook": (torch_hooks.allreduce_hook, False),
}


def check_verified(rank, name):
    what, finds_unused = SOUND[name]
    model = model_of(find_unused_parameters=finds_unused)
    with gradwire.attach(model, what, verify_every=1), model.join():
        for step in range(2 + rank):
            if step == 1:
                model.module[4].weight.register_hook(lambda grad: grad * torch.inf)
            with model.no_sync():
                backward(model, step)
            backward(model, step)


@pytest.mark.parametrize("name", SOUND)
def test_gradients_that_are_the_same_pass_even_if_they_are_infinite(name, three_ranks):
    three_ranks.run(check_verified, name)


def test_verify_every_is_a_number_of_steps():
    for wrong, kind in ((-1, ValueError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(kind, match="verify_every must be"):
            check_interval(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_hash_depends_on_every_bit_of_every_value(dtype):
    torch.manual_seed(0)
    values = torch.randn(40, dtype=dtype)
    bits = values.view(torch.uint8).clone()
    hashes = {hash_of(values).item()}
    for byte in range(bits.numel()):
        for bit in range(8):
            changed = bits.clone()
            changed[byte] ^= 1 << bit
            hashes.add(hash_of(changed.view(dtype)).item())
    assert len(hashes) == 1 + 8 * bits.numel()
    assert hash_of(values.flip(0)).item() not in hashes


# --- parameters ---


def clip(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def skip(model, optimizer):
    """Take no step."""


def step_faster(model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 2
    optimizer.step()


def change_frozen(model, optimizer):
    optimizer.step()
    with torch.no_grad():
        model.module[2].bias[0] += 1e-6


DIVERGING = {"clips": clip, "skips": skip, "steps faster": step_faster, "changes a frozen one": change_frozen}


def check_diverged(rank, name):
    module = net()
    module[2].bias.requires_grad_(False)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.attach(model, "int8", verify_every=2) as wire:
        for step in range(2):
            backward(model, step)
            optimizer.step()
        backward(model, 2)
        if rank == 1:
            DIVERGING[name](model, optimizer)
        else:
            optimizer.step()
        backward(model, 3)  # this step is not compared
        optimizer.step()
        with pytest.raises(gradwire.WireError) as caught:
            backward(model, 4)
        assert wire.failure is None, "the wire goes on"
    text = str(caught.value)
    changed = "2.bias" if name == "changes a frozen one" else "0.weight"
    assert text.startswith(f"rank {rank}, step 4: parameter {changed}"), text
    assert "is not the same on every rank: one on rank(s) 0, 2, another on rank(s) 1." in text
    assert "All were the same at step 2. Ranks have diverged" in text


@pytest.mark.parametrize("name", DIVERGING)
def test_parameters_that_diverge_are_an_error_with_their_name_and_the_last_good_step(name, three_ranks):
    three_ranks.run(check_diverged, name)
