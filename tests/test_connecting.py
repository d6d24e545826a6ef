"""Connections to other ranks: what is asked of the store to make them."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.peers import gather, open_gloo_groups
from gradwire.peers.store_connections import LimitedStore
from gradwire.torch_private import PrefixStore, Store, store_of

TIMEOUT = timedelta(seconds=60)


class CountingStore(Store):
    """Counts the requests that wait for an answer; a far store takes a round trip for each."""

    def __init__(self, store):
        super().__init__()
        self.store, self.num_requests = store, 0

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key):
        self.num_requests += 1
        return self.store.get(key)

    def wait(self, keys, timeout=TIMEOUT):
        self.num_requests += 1
        self.store.wait(keys, timeout)

    def multi_get(self, keys):
        self.num_requests += 1
        return self.store.multi_get(keys)


def check_requests(rank, num_groups):
    inner = PrefixStore(f"counted {num_groups}", store_of(dist.group.WORLD))
    group = gradwire.make_group(inner, rank, dist.get_world_size())
    store = CountingStore(inner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.peers.gloo.limited_store", lambda group, timeout: store)
        groups, notes = open_gloo_groups(
            group, [f"group {i}" for i in range(num_groups)], note=f"from {rank}"
        )
    assert store.num_requests == 2, "one wait for all ranks, and one for all addresses"
    assert notes == [f"from {peer}" for peer in range(group.size())]
    for number, each in enumerate(groups):
        rows = [torch.full((3,), 10.0 * number + (peer == rank) * rank) for peer in range(group.size())]
        gather(rows, each)
        assert [row[0].item() for row in rows] == [10.0 * number + peer for peer in range(group.size())]
        each.close()


@pytest.mark.parametrize("num_groups", [1, 3])
def test_all_addresses_of_all_groups_travel_in_one_exchange(num_groups, three_ranks):
    three_ranks.run(check_requests, num_groups)


def check_missing_rank(rank):
    if rank == 1:
        return
    inner = PrefixStore("one is missing", store_of(dist.group.WORLD))
    limit = timedelta(seconds=0.5)
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        gradwire.peers.connecting.connect_all(LimitedStore(inner, rank, limit), ["alone"], rank, 3, limit)


def test_ranks_that_wait_in_vain_for_an_address_raise_after_the_timeout(three_ranks):
    three_ranks.run(check_missing_rank)
