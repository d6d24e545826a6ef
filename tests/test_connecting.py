"""Connections to other ranks: what is asked of the store to make them."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.lanes import lane
from gradwire.peers import PeerUnreachable, connecting, gather, open_gloo_groups
from gradwire.peers.store_connections import LimitedStore
from gradwire.torch_private import PrefixStore, ProcessGroupGloo, Store, store_of

TIMEOUT = timedelta(seconds=60)


class CountingStore(Store):
    """Counts the requests that wait for an answer; a far store takes a round trip for each."""

    def __init__(self, store):
        super().__init__()
        self.store, self.num_requests = store, 0

    def set(self, key, value):
        self.store.set(key, value)

    def check(self, keys):
        self.num_requests += 1
        return self.store.check(keys)

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
        patch.setattr(connecting, "round_trip_s", lambda store: 0.1 * rank)
        groups = open_gloo_groups(group, [f"group {i}" for i in range(num_groups)])
    assert store.num_requests == 2, "one wait for all ranks, and one for all addresses"
    assert {each.trip_s for each in groups} == {0.1 * (group.size() - 1)}, "that of the furthest rank"
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
        connecting.connect_all(LimitedStore(inner, rank, limit), ["alone"], rank, range(3), limit)


def test_ranks_that_wait_in_vain_for_an_address_raise_after_the_timeout(three_ranks):
    three_ranks.run(check_missing_rank)


def check_half_open(rank):
    """Fail on rank 1 after the first group has connected to all; its error is held until the others know."""
    limit = timedelta(seconds=30)
    store = LimitedStore(PrefixStore("half open", store_of(dist.group.WORLD)), rank, limit)

    names = {}

    def named(name, inner):
        place = PrefixStore(name, inner)
        names[place] = name
        return place

    def fragile(place, *args):
        made = ProcessGroupGloo(place, *args)
        if rank == 1 and names.get(place) == "second/up":
            raise RuntimeError("no more sockets")
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "PrefixStore", named)
        patch.setattr(connecting, "ProcessGroupGloo", fragile)
        # The others have all their connections. They wait for all ranks, unless those close.
        told = "no more sockets" if rank == 1 else "(?i)connection (closed|reset)"
        with pytest.raises(RuntimeError, match=told) as held:
            connecting.connect_all(store, ["first", "second"], rank, range(3), limit)
    dist.barrier()
    del held


def test_no_rank_is_connected_if_one_cannot_connect(three_ranks):
    three_ranks.run(check_half_open)


def check_interrupted(rank):
    def interrupt(*args):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "_trade", interrupt)
        with pytest.raises(KeyboardInterrupt):
            connecting.connect_all(None, ["interrupted"], rank, range(2), TIMEOUT)
    assert not [thread for thread in threading.enumerate() if thread.name == "gradwire-connect"]


def test_no_thread_goes_on_waiting_for_addresses_after_an_interrupt(two_ranks):
    two_ranks.run(check_interrupted)


def check_no_address(rank):
    store = LimitedStore(PrefixStore("no address", store_of(dist.group.WORLD)), rank, TIMEOUT)

    def fragile(name, inner):
        if rank == 1 and name == "second/up":
            raise RuntimeError("no more sockets")
        return PrefixStore(name, inner)

    told = "^no more sockets" if rank == 1 else "^rank 7: no more sockets"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "PrefixStore", fragile)
        with pytest.raises(RuntimeError, match=told):
            connecting.connect_all(store, ["first", "second"], rank, [5, 7, 9], TIMEOUT)


def test_all_ranks_are_told_at_once_of_one_that_has_no_address_by_its_name(three_ranks):
    three_ranks.run(check_no_address)


def check_no_lane(rank):
    opened = []

    def fail(groups, *args, **options):
        opened.extend(groups)
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "WorkerLane", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            lane.open_lane(dist.group.WORLD, torch.device("cpu"), "no lane")
    assert len(opened) == lane.NUM_IN_FLIGHT
    for group in opened:
        with pytest.raises(PeerUnreachable, match="this rank has closed the group"):
            gather([torch.zeros(1), torch.zeros(1)], group)


def test_groups_are_closed_if_no_lane_can_be_made_of_them(two_ranks):
    two_ranks.run(check_no_lane)
