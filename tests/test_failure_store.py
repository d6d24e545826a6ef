"""The store that holds the texts of failures, when its host is gone or does not answer."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from unittest.mock import Mock

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from gradwire.peers import (
    GlooGroup,
    RankStatus,
    failure_store,
    join_rendezvous,
    next_rendezvous,
    store_connections,
)
from gradwire.peers.agreement import agree
from gradwire.peers.connecting import connect_all
from gradwire.peers.failure_store import FailureStore
from gradwire.peers.groups import PeerUnreachable
from gradwire.peers.store_connections import LimitedStore, own_store
from gradwire.ranks import running
from gradwire.torch_private import has_tcp_store
from tests.processes import states_of

SHORT = timedelta(seconds=1)


class Group:
    """Two ranks, as far as a failure store looks at them."""

    group_name = "world"

    def __init__(self, store):
        self._store = store

    def rank(self):
        return 0

    def size(self):
        return 2

    def get_group_store(self):
        return self._store


def host_a_store(ports):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.send(store.port)
    while True:
        signal.pause()


@contextmanager
def hosted_store():
    """Host a store in another process; yield the process and a connection.

    A server forks it: this process has threads in C++, which a fork would leave with their locks held.
    """
    context = running._fork_context()
    receiver, sender = context.Pipe(duplex=False)
    host = context.Process(target=host_a_store, args=(sender,), daemon=True)
    host.start()
    sender.close()  # if the host fails, nothing is read
    try:
        connected = TCPStore("127.0.0.1", receiver.recv(), is_master=False)
        yield host.pid, PrefixStore("group", connected)
    finally:
        host.kill()
        host.join()
        receiver.close()


def end(host, fate):
    """Kill or stop a host, and wait until it is: it may answer before that."""
    os.kill(host, fate)
    while any(state not in "TZ" for state in states_of(host)):
        time.sleep(0.001)


def test_a_text_with_names_that_are_no_utf_8_is_posted_with_escapes():
    store = FailureStore(Group(HashStore()), "odd")
    store.post_failure("no file train\udcff.py")
    assert store.failure() == "no file train\\udcff.py"


def test_a_text_is_there_for_whoever_asks():
    with hosted_store() as (_, store):
        ours, theirs = (FailureStore(Group(store), "wire") for _ in range(2))
        assert ours.failure() is None
        theirs.post_failure("rank 1: broken")
        assert ours.failure() == "rank 1: broken"
        assert ours.is_reachable


def test_a_status_that_is_withdrawn_while_it_is_read_is_none(monkeypatch):
    shared = HashStore()
    ours, theirs = (FailureStore(Group(shared), "wire") for _ in range(2))
    theirs.post_status(RankStatus(3, 1))
    assert ours.status(0) == RankStatus(3, 1)

    class Racing(PrefixStore):
        def check(self, keys):
            is_there = super().check(keys)
            theirs.withdraw_status()
            return is_there

    monkeypatch.setattr(failure_store, "PrefixStore", Racing)
    assert ours.status(0) is None
    assert ours.is_reachable, "a key that is gone is no host that is gone"


def test_a_store_has_a_host_with_and_without_prefixes():
    with hosted_store() as (_, store):
        assert all(map(has_tcp_store, (store.underlying_store, store, PrefixStore("more", store))))
    assert not any(map(has_tcp_store, (HashStore(), PrefixStore("some", HashStore()))))


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_gone_keeps_nobody_waiting(fate, monkeypatch):
    monkeypatch.setattr(failure_store, "_PATIENCE_S", 2.0)  # as it is outside of tests
    asked = []
    with hosted_store() as (host, store):
        end(host, fate)

        def ask():
            failures = FailureStore(Group(store), "wire")
            asked.append((failures.failure(), failures.is_reachable))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(timeout=120)
        assert asked == [(None, False)]


def test_a_program_that_ends_asks_no_more(monkeypatch):
    with hosted_store() as (_, store):
        failures = FailureStore(Group(store), "wire")
        # Python 3.12 and later start no threads in functions that run at exit.
        monkeypatch.setattr(failure_store, "begin", Mock(side_effect=RuntimeError("shutdown")))
        failures.post_failure("rank 0: broken")
        assert failures.failure() is None


def limited(group):
    return LimitedStore(group.get_group_store(), 0, SHORT)


# Each asks the store, and would wait for the answer of a host that is stopped.
ASKING = {
    "a hook's rendezvous": lambda group: next_rendezvous(group, SHORT),
    "a hook's connection": lambda group: own_store(group, SHORT),
    "attach": lambda group: join_rendezvous(group, SHORT, "attach"),
    "an agreement": lambda group: agree(group, "rendezvous", {}, SHORT, "attach"),
    "groups": lambda group: connect_all(limited(group), ["group"], 0, range(2), SHORT),
    "a late group": lambda group: GlooGroup(limited(group), "group", 0, range(2), SHORT).open(),
}


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_every_call_that_meets_others_in_the_store_says_that_its_host_is_gone(fate, monkeypatch):
    monkeypatch.setattr(store_connections, "_GRACE", timedelta(seconds=1))
    with ThreadPoolExecutor(len(ASKING)) as threads, ExitStack() as hosts:
        hosted = [hosts.enter_context(hosted_store()) for _ in ASKING]  # before any thread starts
        for host, _ in hosted:
            end(host, fate)
        calls = [threads.submit(ask, Group(s)) for (_, s), ask in zip(hosted, ASKING.values(), strict=True)]
        for name, call in zip(ASKING, calls, strict=True):
            error = call.exception(timeout=120)
            assert isinstance(error, RuntimeError | PeerUnreachable), name
            assert re.search("rank 0: .*The group's store does not answer.* rank 0 if init", str(error)), name
