"""Errors on every rank when one of them attaches, swaps or sends something else."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp import ddp_attachment_of, user_hooks
from gradwire.peers.agreement import describe_differences
from gradwire.peers.gloo import GlooGroup
from gradwire.peers.groups import PeerUnreachable, gather
from gradwire.peers.store_connections import limited_store
from gradwire.recipes import fingerprint
from tests.models import backward, net


def model_of(**options):
    return DistributedDataParallel(net(), **{"bucket_cap_mb": 0.001, **options})


# What rank 1 of three gives to `attach` instead of bf16 without options, and what all ranks are told.
DIFFERENT = {
    "another recipe": ({"recipe": "fp16"}, "recipe is fp16 on rank(s) 1, bf16 on rank(s) 0, 2"),
    "another reduction": (
        {"recipe": "bf16:reduction=sum"},
        "recipe is bf16:reduction=sum on rank(s) 1, bf16 on rank(s) 0, 2",
    ),
    "another policy": (
        {"on_nonfinite": "skip"},
        "on_nonfinite is skip on rank(s) 1, propagate on rank(s) 0, 2",
    ),
    "another interval": ({"verify_every": 5}, "verify_every is 5 on rank(s) 1, 0 on rank(s) 0, 2"),
}


def told_by_attach(**options):
    with pytest.raises(ValueError, match="ranks call gradwire.attach with different things: ") as caught:
        gradwire.attach(model_of(), **{"recipe": "bf16", **options})
    return str(caught.value).partition("things: ")[2]


def check_different(rank, name):
    changes, told = DIFFERENT[name]
    assert told_by_attach(**(changes if rank == 1 else {})) == told


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_attach_different_things_are_told_who_differs_in_what(name, three_ranks):
    three_ranks.run(check_different, name)


def check_versions(rank):
    version = fingerprint.__version__
    fingerprint.__version__ = "0.2" if rank == 1 else "0.1"
    assert told_by_attach() == "gradwire is 0.2 on rank(s) 1, 0.1 on rank(s) 0, 2"
    fingerprint.__version__ = version


def test_ranks_with_different_versions_are_told_so(three_ranks):
    three_ranks.run(check_versions)


def check_parameters(rank):
    names = ["a", "b"] if rank != 1 else ["b", "a"]
    layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
    with pytest.raises(
        ValueError, match=r"parameter 0 is b\.weight, shape \(4, 4\), float32 on rank\(s\) 1, a"
    ):
        gradwire.attach(DistributedDataParallel(layers), "fp32")


def test_ranks_with_different_parameters_are_told_so(three_ranks):
    three_ranks.run(check_parameters)


def check_exchanges(rank):
    exchange = replace(gradwire.bf16().exchange, seed=7 if rank == 1 else 0)
    with pytest.raises(ValueError, match=r"recipe\.exchange\.seed is 7 on rank\(s\) 1, 0 on rank\(s\) 0, 2"):
        gradwire.attach(model_of(), gradwire.Recipe("mine", exchange))


def test_recipes_of_one_name_that_are_not_the_same_are_told_apart(three_ranks):
    three_ranks.run(check_exchanges)


def check_swap(rank):
    model = model_of()
    wire = gradwire.attach(model, "fp32")
    with pytest.raises(ValueError, match=r"call Wire.swap with .*recipe is fp16 on rank\(s\) 1, bf16 on"):
        wire.swap("fp16" if rank == 1 else "bf16")


def test_ranks_that_swap_to_different_recipes_are_told_so(three_ranks):
    three_ranks.run(check_swap)


def check_other_buckets(rank, what):
    # Without a rebuild, DDP leaves each rank the buckets that it was told to make.
    cap = 25 if rank == 1 else 0.001
    model = model_of(bucket_cap_mb=cap, find_unused_parameters=True, process_group=dist.new_group())
    gradwire.attach(model, what)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(gradwire.WireError) as caught:
        patch.setattr(user_hooks, "_PATIENCE_S", 120.0)  # a rank that stands still comes all the same
        backward(model)
    text = str(caught.value)
    assert text.startswith(f"rank {rank}, step 0, bucket 0, hook "), text
    assert "ValueError: ranks do not agree: bucket 0 is shape (1322,), float32 of 6" in text
    assert " parameters on rank(s) 1, shape (92,), float32 of 3 parameters on rank(s) 0, 2; " in text, text


@pytest.mark.parametrize("what", ["fp32", torch_hooks.allreduce_hook], ids=["a recipe", "a hook"])
def test_ranks_with_different_buckets_are_told_so_before_anything_is_sent(what, three_ranks):
    three_ranks.run(check_other_buckets, what)


LIMIT = timedelta(seconds=8)


def check_other_sizes(rank):
    """Exchange messages of different sizes, which would end a process that leaves it to Gloo."""
    dist.barrier()  # the limit is also that for connecting
    group = GlooGroup(limited_store(dist.group.WORLD, LIMIT), "sizes", rank, range(3), LIMIT)
    group.open()
    rows = [torch.zeros(100 if rank == 1 else 8, dtype=torch.uint8) for _ in range(3)]
    with pytest.raises(PeerUnreachable, match="no message from rank"):
        gather(rows, group)
    group.close()


def test_messages_of_different_sizes_are_an_error_and_do_not_end_the_process(three_ranks):
    three_ranks.run(check_other_sizes)


def check_messages(rank):
    model = model_of()
    with gradwire.attach(model, "fp32") as wire:
        workers = ddp_attachment_of(wire).engine._lane._pool.workers
        sent, before = [], sum(worker.group.traffic.num_messages for worker in workers)
        for step in range(5):
            backward(model, step)
            so_far = sum(worker.group.traffic.num_messages for worker in workers)
            sent.append(so_far - before)
            before = so_far
        expected = [sum(b.num_messages for b in step.buckets) for step in wire.stats().steps]
    assert sent[-2:] == expected[-2:]
    assert sent[0] == expected[0] + 2, "one message to each other rank, for one bucket"


def test_once_all_have_agreed_nothing_is_sent_but_gradients(three_ranks):
    three_ranks.run(check_messages)


def test_what_differs_is_told_briefly():
    claims = [{"a": "1", "a.b": "2", "c": "3"}, {"a": "1", "a.b": "2", "c": "3"}]
    claims.append({"a": "4", "a.b": "5"})
    expected = "a is 4 on rank(s) 2, 1 on rank(s) 0, 1; c is absent on rank(s) 2, 3 on rank(s) 0, 1"
    assert describe_differences(claims) == expected
    many = [{str(n): str(rank) for n in range(10)} for rank in range(2)]
    assert describe_differences(many).endswith("; and 7 more")
