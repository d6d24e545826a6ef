"""The layout of buckets: which parameter lies where."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from gradwire.buckets.layout import BucketLayout, Layouts, Slot, canonical_name
from gradwire.buckets.parameter_state import ParameterState
from gradwire.lanes import completed
from gradwire.testing import run_ranks


def layout_in(layouts, bucket):
    dtype, parameters = bucket.buffer().dtype, bucket.parameters()
    return layouts.of(bucket.index(), dtype, parameters, is_last=bucket.is_last())


class Odd(nn.Module):
    """A model with parameters in every memory order that DDP meets."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(7, 36).t())
        self.tied = nn.Linear(7, 7)
        self.also_tied = nn.Linear(7, 7)
        self.also_tied.weight = self.tied.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.fp64 = nn.Linear(7, 3).double()
        self.block = checkpoint_wrapper(nn.Linear(7, 7))
        self.compiled = torch.compile(nn.Linear(7, 7), disable=True)

    def forward(self, x):
        x = self.conv(x).mean((2, 3)).repeat(1, 6) @ self.transposed
        x = self.also_tied(self.tied(x)).tanh() * self.scalar
        x = self.compiled(self.block(self.frozen(x)))
        return self.fp64(x.double()).square().sum()


def job_layout(rank):
    torch.manual_seed(0)
    net = Odd()
    model = DistributedDataParallel(net, bucket_cap_mb=0.0005)
    layouts = Layouts(net)
    seen = []

    def spy(state, bucket):
        layout = layout_in(layouts, bucket)
        assert layout is layout_in(layouts, bucket), "an unchanged layout is the same object"
        assert layout.numel == bucket.buffer().numel()
        assert layout.dtype == bucket.buffer().dtype
        views = layout.views(bucket.buffer().clone())
        seen.append((bucket.index(), views))
        return completed(bucket.buffer())

    model.register_comm_hook(None, spy)
    num_buckets = []
    for step in range(3):
        seen.clear()
        model.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(2, 4, 5, 5)).backward()
        num_buckets.append(len(seen))
        names = [name for _, views in seen for name in views]
        trained = {canonical_name(name): p for name, p in net.named_parameters() if p.requires_grad}
        assert sorted(names) == sorted(trained), "every trained parameter once, under its first name"
        assert {"tied.weight", "block.weight", "compiled.bias", "scalar"} <= set(names)
        for _, views in seen:
            for name, view in views.items():
                assert view.shape == trained[name].shape
                assert torch.equal(view, trained[name].grad), name
        assert len(layouts.current()) == len(seen)
    assert num_buckets[0] < num_buckets[1] == num_buckets[2], "DDP should have rebuilt its buckets"


def test_views_are_the_gradients_whatever_their_order_in_memory():
    run_ranks(job_layout, 1)


def job_changed_model(rank):
    net = nn.Linear(2, 2)
    layouts = Layouts(nn.Linear(2, 2))
    model = DistributedDataParallel(net)

    def spy(state, bucket):
        with pytest.raises(ValueError, match="attach again after changing a model's parameters"):
            layout_in(layouts, bucket)
        return completed(bucket.buffer())

    model.register_comm_hook(None, spy)
    model(torch.ones(1, 2)).sum().backward()


def test_an_unknown_parameter_is_an_error():
    run_ranks(job_changed_model, 1)


def layout_of(index, *slots):
    placed = [Slot(name, 0, torch.Size(shape), stride) for name, shape, stride in slots]
    return BucketLayout.packed(index, torch.float32, placed)


A, B, C = ("a", (2, 3), (3, 1)), ("b", (4,), (1,)), ("c", (), ())


def test_state_by_parameter_follows_its_parameters_from_bucket_to_bucket():
    whole = layout_of(0, A, B, C)
    state = ParameterState()
    state.flat(whole).copy_(torch.arange(1.0, 12.0))
    assert state.flat(whole) is state.flat(layout_of(0, A, B, C)), "an equal layout moves nothing"
    before = {name: view.clone() for name, view in state.named().items()}

    first, second = layout_of(0, C, B), layout_of(1, A)
    assert torch.equal(state.flat(first), torch.tensor([11.0, 7, 8, 9, 10]))
    assert torch.equal(state.flat(second), torch.arange(1.0, 7.0))
    after = state.named()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)

    state.flat(first).add_(1)  # what is written after a rebuild is carried on, too
    assert torch.equal(state.flat(whole), torch.tensor([1.0, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]))


def test_state_by_parameter_follows_a_change_of_order_in_memory():
    state = ParameterState()
    state.flat(layout_of(0, A)).copy_(torch.arange(6.0))
    transposed = layout_of(0, ("a", (2, 3), (1, 2)))
    assert torch.equal(state.flat(transposed), torch.tensor([0.0, 3, 1, 4, 2, 5]))


def test_a_parameter_without_state_starts_at_zero_and_a_changed_shape_is_an_error():
    state = ParameterState(torch.bfloat16)
    state.flat(layout_of(0, A)).fill_(3)
    assert torch.equal(
        state.flat(layout_of(0, B, A)), torch.tensor([0.0] * 4 + [3] * 6, dtype=torch.bfloat16)
    )
    with pytest.raises(ValueError, match=r"parameter a had shape \(2, 3\) and now has \(3, 2\)"):
        state.flat(layout_of(0, ("a", (3, 2), (2, 1))))


def test_a_bucket_of_which_some_parameters_have_been_forgotten_keeps_the_others():
    whole, state = layout_of(0, A, B, C), ParameterState()
    state.flat(whole).copy_(torch.arange(1.0, 12.0))
    state.drop(layout_of(0, B))
    assert torch.equal(state.flat(whole), torch.tensor([1.0, 2, 3, 4, 5, 6, 0, 0, 0, 0, 11]))


def test_state_of_an_old_layout_is_freed():
    import weakref

    state = ParameterState()
    old = weakref.ref(state.flat(layout_of(0, A, B)))
    state.flat(layout_of(0, A))
    assert old() is not None, "b still lives there"
    state.flat(layout_of(1, B))
    assert old() is None
