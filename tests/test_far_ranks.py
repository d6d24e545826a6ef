"""Ranks that are far apart, over real connections: they receive messages ahead of time."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks.default_hooks import bf16_compress_hook
from gradwire.peers import PeerUnreachable, distance, gather, open_gloo
from tests.models import backward, gradients, net

NEAR_S, FAR_S = 0.0001, 0.02
NUM_STEPS = 6  # a size that has come twice is received ahead of time


def open_far(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distance, "_try_s", lambda store: FAR_S)
        return open_gloo(dist.group.WORLD, name)


def gather_often(group):
    """Gather rows of 60 bytes until they are received ahead of time."""
    for _ in range(3):
        gather(list(torch.zeros(group.size, 60, dtype=torch.uint8)), group)


def job_early(rank):
    """Rank 0 ends a send before rank 1 begins to receive."""
    group, store = open_far("early"), dist.distributed_c10d._get_default_store()
    gather_often(group)
    rows = list(torch.full((2, 60), rank, dtype=torch.uint8))
    if rank == 1:
        store.wait(["has sent"])
    messages = group.post(rows)
    messages.send(1 - rank, rows[rank].clone())
    if rank == 0:
        messages._sends.pop(1).wait()
        store.set("has sent", "")
    messages.finish()
    assert rows[1 - rank].tolist() == 60 * [1 - rank]
    dist.barrier()  # closing fails messages of the other rank
    group.close()


def test_a_message_leaves_before_the_other_rank_asks_for_it(two_ranks):
    two_ranks.run(job_early)


def job_last_message(rank):
    """Rank 1 closes the group when its last message has left; rank 0 has nothing to send back."""
    group, store = open_far("last message"), dist.distributed_c10d._get_default_store()
    gather_often(group)
    row = torch.full((60,), rank, dtype=torch.uint8)
    messages = group.post([row[:0], row] if rank == 0 else [row[:0], row[:0]])
    if rank == 1:
        messages.send(0, row)
        messages.finish()
        group.close()
        store.set("has closed", "")
        return
    store.wait(["has closed"])
    messages.finish()
    assert row.tolist() == 60 * [1]
    with pytest.raises(PeerUnreachable, match="no message from rank 1"):
        gather_often(group)
    group.close()


def test_the_last_message_of_a_rank_that_closes_arrives_and_the_next_is_an_error(two_ranks):
    two_ranks.run(job_last_message)


def job_collected(rank):
    group = open_far("collected")
    gather_often(group)
    dist.barrier()
    gc.disable()
    gone = weakref.ref(group._mailboxes)
    group.close()
    del group
    assert gone() is None, "there is no cycle"
    gc.enable()


def test_a_closed_group_keeps_no_memory(two_ranks):
    two_ranks.run(job_collected)


def train(what, trip_s):
    """Return the gradients of some steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distance, "_try_s", lambda store: trip_s)
        model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
        if what == "raw":
            model.register_comm_hook(None, bf16_compress_hook)
        else:
            wire = gradwire.attach(model, what)
        found = []
        for step in range(NUM_STEPS):
            backward(model, step)
            found.append(gradients(model))
        if what != "raw":
            wire.detach()
        return found


SPECS = [
    "fp32",
    "int8",
    "int4:feedback=true",
    "powersgd:rank=2",
    "acp:rank=2",
    "schedule(0=fp32; 3=int2)",
    "raw",
]


def job_same_bits(rank, specs):
    for spec in specs:
        near, far = (train(spec, trip_s) for trip_s in (NEAR_S, FAR_S))
        assert all(map(torch.equal, near, far)), spec
        rows = list(torch.stack(far).new_empty(dist.get_world_size(), NUM_STEPS, far[0].numel()))
        dist.all_gather(rows, torch.stack(far))
        assert all(torch.equal(row, rows[0]) for row in rows), spec


def test_two_ranks_average_to_the_same_bits_near_and_far(two_ranks):
    two_ranks.run(job_same_bits, SPECS)


def test_three_ranks_average_to_the_same_bits_near_and_far(three_ranks):
    three_ranks.run(job_same_bits, [spec for spec in SPECS if spec != "raw"])


def test_nodes_average_to_the_same_bits_near_and_far(four_ranks):
    four_ranks.run(job_same_bits, ["int8:local_size=2", "int8:local_size=2,within=same"])


def average_lists(rank, trip_s):
    """Return means of lists of tensors whose sizes change from call to call."""
    random, found = torch.Generator().manual_seed(rank), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distance, "_try_s", lambda store: trip_s)
        averager = gradwire.Averager("int8")
        for step in range(12):
            tensors = [torch.randn(40 + 7 * (step % 3), 11, generator=random) for _ in range(1 + step % 2)]
            averager.average_(tensors)
            found += [*tensors, averager.all_gather(torch.full((20 + step % 4,), 1.0 * rank))]
        averager.close()
    return found


def job_averager(rank):
    near, far = (average_lists(rank, trip_s) for trip_s in (NEAR_S, FAR_S))
    assert all(map(torch.equal, near, far))


def test_an_averager_of_far_ranks_takes_lists_that_change(two_ranks):
    two_ranks.run(job_averager)
