"""Kill every process in the given network namespaces once the parent of this program is gone.

It is a program of its own. It runs by its path and without site-packages, so it starts in milliseconds::

    python -I -S reaper.py FILE...     # numbers of open files, one per namespace

It waits for the end of its standard input. That comes when the parent closes the lab, and also when the
parent is killed.
"""

import contextlib
import os
import signal
import sys


def processes_in(namespaces: set[tuple[int, int]]) -> list[int]:
    """Return the ids of the processes in one of the namespaces, except our parent's."""
    # A thread of the parent may be inside a namespace for a moment, to start a process there.
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/{pid}/ns/net")
            if (status.st_dev, status.st_ino) in namespaces and int(pid) != os.getppid():
                found.append(int(pid))
    return found


def main() -> None:
    """Wait for the parent to end, then kill until no process is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    namespaces = {(s.st_dev, s.st_ino) for s in (os.fstat(int(file)) for file in sys.argv[1:])}
    while pids := processes_in(namespaces):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
