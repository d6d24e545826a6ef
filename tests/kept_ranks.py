"""Ranks that are kept from test to test, so that each scenario can be a test of its own."""

import itertools
import pickle
import queue
import threading
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from gradwire.peers import distance
from gradwire.ranks import time_limit
from gradwire.testing import run_ranks, send_message

SESSION_S = 3600.0


class KeptRanks:
    """Ranks that run one scenario after the other.

    A scenario that fails ends the ranks, and the next one gets new ones. A rank that hangs in a scenario is
    ended, and its stack is shown.
    """

    def __init__(self, world_size, scenario_s=180.0):
        self.world_size = world_size
        self.scenario_s = scenario_s
        """Seconds that a scenario may take. A change counts for ranks that start after it."""
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._numbers = itertools.count()
        self._thread = None

    def run(self, scenario, *args):
        """Run ``scenario(rank, *args)`` on all ranks. It is a function of the top level of a module."""
        if self._thread is None:
            self._events = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._keep, args=(next(self._numbers),), daemon=True)
            self._thread.start()
        self._hand_over((scenario, args))
        for _ in range(self.world_size):
            error = self._events.get()
            if error is not None:
                self._thread.join()
                self._thread = None
                raise error

    def end(self):
        if self._thread is not None:
            self._hand_over(None)
            self._thread.join()

    def _hand_over(self, task):
        self._store.set(f"task {next(self._numbers)}", pickle.dumps(task))

    def _keep(self, first):
        try:
            args = (self._store.port, first + 1, self.scenario_s)
            run_ranks(serve, self.world_size, SESSION_S, args=args, on_message=self._note)
        except BaseException as error:
            self._events.put(error)

    def _note(self, rank, message):
        self._events.put(None)


def serve(rank, port, first, scenario_s):
    """Run tasks in their order until there is none."""
    # On a busy machine the store may answer so late that ranks seem far apart. Buckets would share messages,
    # which makes these a few bytes longer.
    distance._try_s = lambda store: 0.0
    store = TCPStore("127.0.0.1", port, is_master=False)
    for number in itertools.count(first):
        store.wait([f"task {number}"], timedelta(seconds=SESSION_S))
        task = pickle.loads(store.get(f"task {number}"))
        if task is None:
            return
        scenario, args = task
        with time_limit(scenario_s):
            scenario(rank, *args)
        send_message("done")


@contextmanager
def kept_ranks(world_size, **options):
    """Keep ranks for as long as the block runs."""
    ranks = KeptRanks(world_size, **options)
    try:
        yield ranks
    finally:
        ranks.end()
