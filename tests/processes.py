"""Whether processes are still there."""

import time


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids):
    deadline, pids = time.monotonic() + 20, list(pids)
    while left := list(filter(is_alive, pids)):
        assert time.monotonic() < deadline, f"processes are left behind: {left}"
        time.sleep(0.05)
