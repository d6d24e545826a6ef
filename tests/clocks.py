"""Clocks that depend on what has happened, not on how fast the machine is."""

import threading
import time


class WaitingClock:
    """A stand-in for the module ``time``: time stands still until ``has_happened()``."""

    def __init__(self, has_happened):
        self._has_happened, self._begin = has_happened, time.monotonic()
        self.sleep = time.sleep

    def monotonic(self):
        return time.monotonic() if self._has_happened() else self._begin


class CountingClock(threading.local):
    """A stand-in for the module ``time``: for each thread by itself, a look at the clock takes 10 ms."""

    now = 0.0

    def monotonic(self):
        self.now += 0.01
        return self.now

    def sleep(self, seconds):
        self.now += seconds
