"""Pass frames between pairs of TAP devices, each frame after a delay, until the parent is gone.

It is a program of its own. It runs by its path and without site-packages, so it starts in milliseconds::

    python -I -S relay.py SECONDS FILE FILE [FILE FILE]...     # numbers of open files, one pair per link

It ends with its standard input. Its devices end with it.
"""

import collections
import contextlib
import os
import select
import signal
import sys
import time

# A frame of 64 KiB, which the receiving end may cut, with the header that says how.
_MAX_FRAME_BYTES = (1 << 16) + 64
# Frames that wait at most; later ones are lost, as in a switch that is full.
_MAX_WAITING = 1 << 16


def relay(ends: dict[int, int], delay_s: float, parent: int) -> None:
    """Write what each end reads to its other end, ``delay_s`` seconds later, until ``parent`` ends."""
    # All frames wait equally long, so they leave in the order in which they came.
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    sources = [parent, *ends]
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(sources, [], [], timeout)
        if parent in ready:
            return
        now = time.monotonic()
        for source in ready:
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(source, _MAX_FRAME_BYTES)
                    if len(waiting) < _MAX_WAITING:
                        waiting.append((now + delay_s, ends[source], frame))
        while waiting and waiting[0][0] <= now:
            _, end, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a device that is not up yet loses its frames
                os.write(end, frame)


def main() -> None:
    """Read the arguments, and relay."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # a frame that waits for this process is late
    files = list(map(int, sys.argv[2:]))
    ends: dict[int, int] = {}
    for one, other in zip(files[::2], files[1::2], strict=True):
        os.set_blocking(one, False)
        os.set_blocking(other, False)
        ends |= {one: other, other: one}
    relay(ends, float(sys.argv[1]), sys.stdin.fileno())


if __name__ == "__main__":
    main()
