"""Ranks that find each other in a store, also in one with entries of an earlier run."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch.distributed as dist

from gradwire.peers import CollectiveCall, GridCall, rendezvous
from gradwire.peers.agreement import agree
from gradwire.peers.rendezvous import claim_key, join_rendezvous
from tests.clocks import WaitingClock

LONG, SHORT = timedelta(seconds=120), timedelta(seconds=0.05)


@dataclass(eq=False)
class Member:
    """The part of a process group that a rendezvous needs, as one process has it."""

    number: int
    num_ranks: int
    store: dist.Store

    def rank(self):
        return self.number

    def size(self):
        return self.num_ranks

    def get_group_store(self):
        return self.store


class Noticing(dist.Store):
    """A store that also tells when a rank other than 0 has answered."""

    def __init__(self, store):
        super().__init__()
        self.answered = threading.Event()
        self.check, self.compare_set, self._store = store.check, store.compare_set, store

    def set(self, key, value):
        self._store.set(key, value)
        if "/answer/" in key:
            self.answered.set()


@pytest.fixture
def store():
    return dist.HashStore()


def together(work, members):
    """Run ``work`` for all members at the same time, and return each one's result."""
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(work, members))


def start(store, size=3):
    return [Member(rank, size, store) for rank in range(size)]


def test_ranks_that_start_again_know_a_living_rank_0_from_a_dead_one(store):
    names = together(lambda m: join_rendezvous(m, LONG, "attach"), start(store))
    assert len(set(names)) == 1
    first, second, third = start(store)
    early = Noticing(store)
    second.store = early
    with ThreadPoolExecutor(3) as threads:
        waiting = threads.submit(join_rendezvous, second, LONG, "attach")
        assert early.answered.wait(120), "it has answered the dead one, whose name is there still"
        assert not waiting.done()
        others = threads.map(lambda m: join_rendezvous(m, LONG, "attach"), [first, third])
        again = [waiting.result(), *others]
    assert len(set(again)) == 1
    assert again[0] not in names


def test_a_rank_that_died_between_rendezvous_keeps_those_that_start_again_from_nothing(store):
    members = start(store)
    together(lambda m: join_rendezvous(m, LONG, "attach"), members)
    saved = {"step": "400"}
    for alive in members[:2]:  # the third has died before it came to load
        with pytest.raises(
            RuntimeError, match=r"load is collective, but rank\(s\) .*2 of a group of 3 did not call it"
        ):
            agree(alive, join_rendezvous(alive, SHORT, "attach"), saved, SHORT, "load")
    for _ in range(2):
        members = start(store)
        together(
            lambda m: agree(
                m, join_rendezvous(m, LONG, "attach"), {"recipe": "int8"}, LONG, "gradwire.attach"
            ),
            members,
        )
        together(lambda m: agree(m, join_rendezvous(m, LONG, "attach"), saved, LONG, "load"), members)


def test_a_rank_raises_its_own_error_even_if_another_does_not_come(store, caplog):
    first, _ = together(lambda m: (join_rendezvous(m, LONG, "attach"), m)[1], start(store, size=2))
    with pytest.raises(KeyError, match="no such thing"), CollectiveCall(first, SHORT, "attach"):
        raise KeyError("no such thing")
    assert "attach is collective, but rank(s) 1 of a group of 2 did not call it" in caplog.text


def test_an_error_reaches_those_that_average_even_if_a_shard_does_not_come(store):
    """Rank 0 fails; the rank with its other shard is gone, and the one with the same shard waits."""
    averaging = start(store, size=2)
    shards = together(lambda m: (join_rendezvous(m, LONG, "swap"), m)[1], start(dist.HashStore(), size=2))

    def fail(member):
        with pytest.raises(KeyError), GridCall(member, shards[0], SHORT, "swap"):
            raise KeyError("no such thing")

    def wait(member):
        with (
            pytest.raises(RuntimeError, match="swap failed on rank 0: 'no such thing'"),
            GridCall(member, None, LONG, "swap") as call,
        ):
            call.agree({"recipe": "int8"})

    together(lambda member: (wait if member.number else fail)(member), averaging)


def test_every_rendezvous_has_a_name_of_its_own(store):
    members = start(store)
    names = together(lambda m: [join_rendezvous(m, LONG, "attach") for _ in range(3)], members)
    assert names[0] == names[1] == names[2]
    assert len(set(names[0])) == 3


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_those_who_wait_in_vain_say_for_whom(store, missing, monkeypatch):
    def work(member):
        with pytest.raises(RuntimeError) as caught:
            join_rendezvous(member, timedelta(seconds=0.3), "swap")
        return str(caught.value)

    store = Noticing(store)
    members = start(store)
    del members[missing]
    # Rank 0 and another one meet before their time is up. Without rank 0, nobody answers.
    clock = WaitingClock(lambda: missing == 0 or store.answered.is_set())
    monkeypatch.setattr(rendezvous, "time", clock)
    for text in together(work, members):
        assert (
            f"swap is collective, but rank(s) {missing} of a group of 3 did not call it within 0.3 s" in text
        )


class Counting(dist.Store):
    """A store that counts requests."""

    def __init__(self, store):
        super().__init__()
        self.num_requests = 0
        for name in ("set", "get", "check", "wait", "multi_get"):
            setattr(self, name, self._counted(getattr(store, name)))

    def _counted(self, ask):
        def count_and_ask(*args):
            self.num_requests += 1
            return ask(*args)

        return count_and_ask


def test_a_rank_does_not_ask_the_store_for_each_other_rank(store):
    def work(member):
        return agree(member, "a meeting", {"recipe": "int8"}, LONG, "attach", note=str(member.number))

    last, *others = start(store, size=40)
    with ThreadPoolExecutor(len(others)) as threads:
        waiting = threads.map(work, others)
        store.wait([claim_key("a meeting", member.number) for member in others], LONG)
        last.store = Counting(store)
        notes = [work(last), *waiting]
    assert notes == [[str(rank) for rank in range(40)]] * 40
    assert last.store.num_requests == 4


def test_a_rank_alone_waits_for_nobody(store):
    (alone,) = start(store, size=1)
    assert join_rendezvous(alone, SHORT, "attach") != join_rendezvous(alone, SHORT, "attach")


def test_a_rank_whose_peers_come_just_in_time_does_not_name_them(monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "SLOW_S", 0.0)
    for missing in ([], [1]):
        log = rendezvous.WaitLog(Member(0, 2, dist.HashStore()), LONG, "gradwire.attach")
        log.tell(lambda missing=missing: missing)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 waits in gradwire.attach for rank(s) 1 of a group of 2, which have not called it; it will "
        "wait for 120 s in all. Every rank of the process group must call it"
    ]
