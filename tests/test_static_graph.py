"""``static_graph=True`` with several buckets in the first pass, which DDP hands out in a way of its own."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import powerSGD_hook
from tests.models import gradients

NUM_STEPS = 7


class Mixed(nn.Module):
    """Parameters of two dtypes, and an embedding with sparse gradients: buckets of three kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
        self.embedding = nn.Embedding(9, 16, sparse=True)

    def forward(self, x, words):
        return (self.linear(x) + self.embedding(words) * self.scale.float()).square().mean()


def make(hook="int8", **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Mixed(), static_graph=True)
    wire = gradwire.attach(model, hook, **options) if hook else None
    return model, torch.optim.SGD(model.parameters(), lr=0.1), wire


def train(model, optimizer, steps, rank, factor=1.0):
    for step in steps:
        torch.manual_seed(100 * rank + step)
        optimizer.zero_grad()
        (factor * model(torch.randn(4, 16), torch.randint(9, (4,)))).backward()
        optimizer.step()


def check_resumed(rank, stopped_at):
    model, optimizer, wire = make()
    train(model, optimizer, range(stopped_at), rank)
    assert wire.stats().num_steps == stopped_at
    saved = {k: v.clone() for k, v in model.module.state_dict().items()}, wire.state_dict()
    assert saved[1]["step"] == stopped_at
    train(model, optimizer, range(stopped_at, NUM_STEPS), rank)
    resumed, optimizer, wire = make()
    resumed.module.load_state_dict(saved[0])
    wire.load_state_dict(saved[1])
    train(resumed, optimizer, range(stopped_at, NUM_STEPS), rank)
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[name]), name


@pytest.mark.parametrize("stopped_at", [1, 3])
def test_a_run_counts_backward_passes_and_resumes_bit_for_bit(stopped_at, two_ranks):
    two_ranks.run(check_resumed, stopped_at)


def check_plain(rank):
    (plain, optimizer, _), (model, own_optimizer, wire) = make(None), make("fp32", verify_every=1)
    train(plain, optimizer, range(3), rank)
    train(model, own_optimizer, range(3), rank)
    for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.float(), wanted.float(), rtol=1e-2 if own.dtype == torch.bfloat16 else 1e-5)
    assert [layout.index for layout in wire.layout()] == [0, 1, 2]


def test_every_bucket_is_averaged_from_the_first_step_on(two_ranks):
    two_ranks.run(check_plain)


def check_nonfinite(rank):
    model, optimizer, _ = make("int8", on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"step 0: .* is not finite"):
        train(model, optimizer, [0], rank, factor=float("inf") if rank else 1.0)
    model, optimizer, wire = make("int8", on_nonfinite="skip")
    train(model, optimizer, [0], rank, factor=float("inf") if rank else 1.0)
    assert wire.stats().num_skipped == 1
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_that_is_not_finite_is_found_in_the_first_step(two_ranks):
    two_ranks.run(check_nonfinite)


def raise_on_one_rank(rank, bucket):
    if rank == 1:
        raise KeyError("no such key")
    future = torch.futures.Future()
    future.set_result(bucket.buffer())  # no message that would wait for rank 1 in the group of later tests
    return future


def check_raising(rank):
    model, optimizer, _ = make(raise_on_one_rank, state=rank)
    with pytest.raises(gradwire.WireError, match=r"rank 1, step 0, bucket 0.*no such key"):
        train(model, optimizer, [0], rank)


def test_an_error_of_a_hook_in_the_first_step_is_raised_on_every_rank(two_ranks):
    two_ranks.run(check_raising)


def check_raw(rank):
    counts = []
    for is_attached in (True, False):
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model, optimizer, _ = make(None)
        if is_attached:
            gradwire.attach(model, powerSGD_hook.powerSGD_hook, state=state)
        else:
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(model, optimizer, range(4), rank)
        dense = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in model.parameters()]
        assert all(grad.isfinite().all() for grad in dense)
        counts.append(state.iter)
    assert counts == [4, 4]


def test_powersgd_states_count_the_first_step_once(two_ranks):
    two_ranks.run(check_raw)


def check_lone_bucket(rank):
    plain = DistributedDataParallel(nn.Linear(8, 8), static_graph=True)
    model = DistributedDataParallel(nn.Linear(8, 8), static_graph=True)
    model.load_state_dict(plain.state_dict())
    wire = gradwire.attach(model, "fp32")
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(rank)
            each(torch.randn(4, 8)).square().mean().backward()
        assert torch.allclose(gradients(model), gradients(plain))
    assert wire.stats().num_steps == 3


def test_a_model_of_one_bucket_is_counted_once_too(two_ranks):
    two_ranks.run(check_lone_bucket)
