"""Workers under torchft's manager: one is killed, another joins, and all end with the same parameters."""

import contextlib
import os
import signal
import threading

import pytest

from tests.frameworks.scripts import LIMIT_S, ROOT, kill, start

torchft = pytest.importorskip("torchft.coordination", reason="torchft has wheels for Linux on x86-64 alone")

STEPS, PERIOD = 80, 10
EXAMPLE = ROOT / "examples" / "diloco_torchft.py"

# A script that runs another, which stands still after a step until somebody opens a pipe to write.
STANDING = """
import builtins, functools, runpy, sys

show = builtins.print
del sys.argv[0]
step, pipe = sys.argv.pop(0), sys.argv.pop(0)

@functools.wraps(show)  # numba looks for it by its name
def show_and_stand(*words, **options):
    show(*words, **options)
    if str(words[0]).startswith(f"step {step},"):
        open(pipe).close()

builtins.print = show_and_stand
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def until(worker, text):
    """Read what a worker prints until a line has a text; return the lines."""
    said = []
    for line in worker.stdout:
        said.append(line)
        if text in line:
            return said
    raise AssertionError("".join(said)[-6000:])


def test_workers_end_alike_after_one_is_killed_and_another_joins(tmp_path, monkeypatch):
    standing, pipe = tmp_path / "standing.py", tmp_path / "pipe"
    standing.write_text(STANDING)
    os.mkfifo(pipe)
    lighthouse = torchft.LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000 * LIMIT_S)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}")
    with contextlib.ExitStack() as stack:
        stack.callback(lighthouse.shutdown)

        def worker(*command):
            own = ["--host", "127.0.0.1", "--steps", STEPS, "--period", PERIOD]
            found = stack.enter_context(start([*command, EXAMPLE, *own], tmp_path))
            stack.callback(kill, found)
            limit = threading.Timer(LIMIT_S, kill, [found])
            stack.callback(limit.cancel)
            limit.start()
            return found

        lost, one, other = worker(), worker(standing, STEPS // 2, pipe), worker()
        until(lost, "step 10, 3 workers")
        os.kill(lost.pid, signal.SIGKILL)
        until(one, f"step {STEPS // 2}, 2 workers")  # where it stands
        new = worker()
        until(new, "Start quorum")
        pipe.write_text("")
        last = f"step {STEPS}, 3 workers"
        for each in (one, other, new):
            until(each, last)
        losses = {until(each, "held-out loss")[-1] for each in (one, other, new)}
        assert len(losses) == 1, losses
        assert [each.wait(LIMIT_S) for each in (one, other, new)] == [0, 0, 0]
