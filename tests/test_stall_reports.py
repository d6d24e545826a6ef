"""Reports on ranks that stand still: where each one is, and which is furthest behind."""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from gradwire.errors import Place
from gradwire.lanes import stream_progress
from gradwire.lanes.stream_progress import StreamMark, StreamProgress
from gradwire.peers import stall_watcher
from gradwire.peers.failure import Failure
from gradwire.peers.failure_store import RankStatus
from gradwire.peers.groups import PeerUnreachable
from gradwire.peers.main_thread import describe_main_thread
from gradwire.peers.stall_watcher import Progress, StallWatcher

NOW = 5000.0
CLOCK = SimpleNamespace(monotonic=lambda: NOW)


class Events:
    """A stand-in for a CUDA event that is reached, or not."""

    def __init__(self, *, reached):
        self.query = lambda: reached


class Posted:
    """A stand-in for the failure store of rank 0 of three."""

    rank, size, is_reachable = 0, 3, True

    def __init__(self, others):
        self.statuses = dict(others)
        self.text = None

    def failure(self):
        return self.text

    def status(self, rank):
        return self.statuses.get(rank)

    def post_status(self, status):
        self.statuses[0] = status

    def withdraw_status(self):
        self.statuses.pop(0, None)


def test_a_lane_that_stands_still_says_so_before_the_timeout_ends_the_process(caplog, monkeypatch):
    monkeypatch.setattr(stall_watcher, "time", CLOCK)
    failure = Failure(None, "")
    waiting = RankStatus(7, 1, waits_for=1)
    failure.store = store = Posted({1: RankStatus(6, 2, is_done=True), 2: waiting})
    watch = StallWatcher(failure, 1000, lambda: None, "test")
    watch.end()
    place = Place(0, 7, 1, "int8")
    try:
        watch._act(Progress(place, False, NOW - 400))
        assert 0 not in store.statuses, "nothing is posted while all goes well"
        watch._act(Progress(place, False, NOW - 600, waits_for=1))
        assert store.statuses[0] == RankStatus(7, 1, waits_for=1)
        assert not caplog.records
        for _ in range(2):
            watch._act(Progress(place, False, NOW - 800, waits_for=1))
        (record,) = caplog.records  # once
        assert record.getMessage() == (
            "rank 0, step 7, bucket 1, hook int8: no progress for 800 s. Rank 1 has averaged step 6, bucket "
            "2 and started no bucket since. Furthest behind is rank 1; see what it does there. Raise the "
            "timeout of init_process_group if it is only slow"
        )
        watch._act(Progress(place, True, NOW))
        assert 0 not in store.statuses, "what is not true any more is withdrawn"
        watch._act(Progress(place, True, NOW - 900))
        assert store.statuses[0].doing.startswith("its main thread is at ")
        assert len(caplog.records) == 1, "a rank may rest as long as it likes"
        store.text = "rank 1, step 7, bucket 1, hook int8: KeyError: 'lost'"
        watch._act(Progress(place, False, NOW - 800))
        assert caplog.records[1].getMessage().endswith("no progress for 800 s. " + store.text)
    finally:
        watch.end()


def test_advice_about_the_timeout_is_for_those_who_have_waited_that_long():
    failure, place = Failure(None, ""), Place(0, 7, 1, "int8")
    late = "Timed out waiting 8000ms for recv operation to complete"

    def explained(reason, others):
        failure.store = Posted(others)
        return str(failure.explain(place, PeerUnreachable(1, reason), lambda: None))

    is_slow = ". Raise the timeout of init_process_group if it is only slow"
    gone = "Furthest behind is rank 1, which says nothing: it left or died; its own output says why"
    assert (
        explained("Connection closed by peer", {})
        == f"{place}: no message from rank 1: Connection closed by peer. {gone}"
    )
    assert explained(late, {}).endswith(
        f"it left, died, is stopped or stuck; its own output says why{is_slow}"
    )
    busy = RankStatus(6, 2, is_done=True)
    both = {1: busy, 2: RankStatus(7, 1, waits_for=1)}
    assert explained(late, both).endswith(f"Furthest behind is rank 1; see what it does there{is_slow}")
    # Rank 1 may wait in a collective of torch's, of which nothing is known here.
    assert "Furthest behind is rank 2, which says nothing" in explained(late, {1: busy})
    # A rank that has waited long enough closes, and others see that alone.
    waited = RankStatus(7, 1, waits_for=2, timed_out=True)
    assert explained("Connection closed by peer", {1: waited}).endswith(is_slow)


def test_a_rank_between_buckets_says_which_line_of_the_users_code_it_is_at():
    def seen_by_another_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(describe_main_thread).result()

    here = rf"{re.escape(__file__)}:\d+ in seen_by_another_thread"
    assert re.fullmatch(f"its main thread is at {here}", seen_by_another_thread())
    try:
        raise ValueError("an odd batch\nof many lines")
    except ValueError:
        said = seen_by_another_thread()
    assert re.fullmatch(f"its main thread handles ValueError: an odd batch, at {here}", said)


def test_the_oldest_bucket_that_the_device_has_not_finished_is_the_one_that_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(stream_progress, "time", CLOCK)

    def told(num_marks, since=-100.0, running=None):
        marks = StreamProgress(patience_s=1.0)
        for bucket in range(num_marks):
            place = Place(0, 3, bucket, "int8")
            marks.add(StreamMark(place, Events(reached=bucket < 2), None, NOW + since + bucket))
        marks.running = running
        progress = marks.look()
        return None if progress.place is None else progress.place.bucket, progress.is_done

    assert told(0) == (None, True)
    assert told(4) == (2, False)
    assert told(2) == (1, True)
    # A bucket that the host is at, and one that came a moment ago, when the device is not asked.
    assert told(2, running=(Place(0, 3, 2, "int8"), 0.0)) == (2, False)
    assert told(4, since=-3.5) == (3, True)
