"""Plans and caches of low rank: made once for a bucket, and gone with it."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, LowRank, Scratch, average
from gradwire.exchanges.matrices import plan_of
from gradwire.exchanges.unused import _sizes
from gradwire.testing import run_virtual_ranks
from tests.drawn_buckets import draw, layout_of

try:
    from gradwire.ops.cuda import low_rank as cuda
except ImportError:  # no Triton for this platform
    cuda = None


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_steady_state_allocates_no_tensors(num_rounds):
    layout = layout_of((600, 500), (500,), (500, 600))
    exchange = LowRank(4, num_rounds=num_rounds)

    def job(group):
        memory, scratch, largest = Memory(), Scratch(), []
        (flat,) = draw(group.rank, layout.numel)
        for step in range(5):
            context = Context(group, scratch, 0.5, layout, memory, step)
            with largest_allocation() as found:
                average(flat, exchange, context)
            largest.append(found)
        return largest

    for largest in run_virtual_ranks(job, 2):
        assert largest[0]["bytes"] > layout.numel, "the first step makes what the others use"
        # With one round, the second step is the first to find its side.
        assert [found["bytes"] for found in largest[2:]] == [0] * 3, largest


@contextlib.contextmanager
def largest_allocation():
    """Record the size of the largest new tensor that any op of torch allocates inside."""

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {
                t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
            }
            result = func(*args, **(kwargs or {}))
            for made in tree_leaves(result):
                if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                    found["bytes"] = max(found["bytes"], made.untyped_storage().nbytes())
                    found["op"] = str(func)
            return result

    found = {"bytes": 0}
    with Look():
        yield found


def test_a_plan_is_made_once_however_many_buckets_there_are():
    layouts = [
        BucketLayout(index, torch.float32, (Slot("weight", 0, torch.Size([32, 32]), (32, 1)),))
        for index in range(2000)
    ]
    plans = [plan_of(layout, 2, 2.0, False) for layout in layouts]
    assert all(plan_of(layout, 2, 2.0, False) is plan for layout, plan in zip(layouts, plans, strict=True))


def test_what_is_made_once_for_a_bucket_ends_with_its_layout():
    layout, device = layout_of((64, 64), (7,), (64, 64)), torch.device("cpu")
    plan = plan_of(layout, 4, 2.0, False)
    assert plan is plan_of(layout, 4, 2.0, False)
    assert plan is not plan_of(layout, 2, 2.0, False)
    route = gradwire.recipe("route(p0=fp32; *=int8)").exchange
    parts = route.split(layout)
    assert parts is route.split(layout)
    made = [plan, parts[0][1], parts[1][1], _sizes(layout, device), plan_of(layout, 4, 2.0, True)]
    if cuda is not None:
        made += [cuda._tiles(plan.batches, device), cuda._matrices(plan.batches, "left", 0, device)]
    ends = [weakref.ref(each) for each in made]
    del layout, plan, parts, made
    gc.collect()
    assert [end() for end in ends] == [None] * len(ends)
