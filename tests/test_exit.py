"""Programs that never detach still end as they should."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.testing import run_ranks
from tests.torch_versions import needs_names_of_gloo_threads

# Importing torch takes seconds and DDP some more, so it is done once: each rank is then forked, before there
# are threads, and ends as a program does.
SCRIPT = """
import json, os, sys, torch
import torch._dynamo
import torch.distributed as dist
import gradwire
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from gradwire.ddp_comm_hooks.default_hooks import bf16_compress_hook
from gradwire.peers import distance

folder, ranks = sys.argv[1], {}
for how in sys.argv[2:]:
    for rank in range(2):
        if not (pid := os.fork()):
            break
        ranks[f"{how}{rank}"] = pid
    if not pid:
        break

if pid:
    print(json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in ranks.items()}))
else:
    output = os.open(f"{folder}/{how}{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{how}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
    if how.startswith("far"):
        distance._try_s = lambda store: 0.02  # some receives are pending at the end
    if how.endswith("raw"):
        model.register_comm_hook(None, bf16_compress_hook)
    else:
        wire = gradwire.attach(model, allreduce_hook if how == "hook" else "bf16")
    for _ in range(3):
        model(torch.randn(2, 50)).sum().backward()
    if how == "destroy":
        dist.destroy_process_group()
"""
WAYS = ["recipe", "hook", "raw", "destroy", "far", "far raw"]


# Each way of ending has its own race with the interpreter, so `make test-full` tries more often.
@pytest.fixture(scope="module", params=[0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 5))])
def endings(request, tmp_path_factory):
    """Return what each of two ranks has printed, and its exit code, for one way to end."""
    folder = tmp_path_factory.mktemp("endings")
    started = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), *WAYS],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        start_new_session=True,
    )
    try:
        codes = json.loads(started.communicate(timeout=300)[0])
    finally:
        with contextlib.suppress(ProcessLookupError):  # its ranks too
            os.killpg(started.pid, signal.SIGKILL)
    return {
        how: [(said_by(folder / f"{how}{rank}"), codes[f"{how}{rank}"]) for rank in range(2)] for how in WAYS
    }


def said_by(file):
    """Return what a rank has said, apart from the news that a cold cache of kernels is being filled."""
    lines = file.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("gradwire compiles its CPU kernels"))


@pytest.mark.parametrize("how", WAYS)
def test_a_program_that_never_detaches_ends_with_code_0_and_nothing_on_stderr(endings, how):
    assert endings[how] == [("", 0), ("", 0)]


def drop_while_busy(rank, how):
    """Drop a model whose group runs a callback, which needs the GIL once more."""
    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(torch.nn.Linear(5, 5), process_group=group)
    wire = gradwire.attach(model, "bf16")
    model(torch.ones(2, 5)).sum().backward()
    if how == "detached":
        wire.detach()
    is_called = threading.Event()

    def wait_a_little(_):
        is_called.set()
        time.sleep(0.2)  # without the GIL

    if rank == 1:
        store.wait(["listening"])
    future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
    if rank == 0:
        future.then(wait_a_little)
        store.set("listening", "")
        is_called.wait()
    else:
        future.wait()
    dist.destroy_process_group(group)
    reducer = weakref.ref(model.reducer)
    del group, model, wire, future
    gc.collect()
    assert reducer() is None


@pytest.mark.parametrize("how", ["attached", "detached"])
def test_a_model_can_be_dropped_while_a_thread_of_its_group_needs_the_gil(how):
    run_ranks(drop_while_busy, 2, args=[how])


# A collective of two groups in one process. The second joins in when the interpreter ends, and the thread of
# the first then drops its tensor. That takes 0.3 s, most of it without the GIL.
LATE_DROP = """
import atexit, sys, threading, time
from datetime import timedelta
import torch
import gradwire.ddp
from torch.distributed import HashStore, ProcessGroupGloo

class SlowToGo:
    def __init__(self):
        self.sleep = time.sleep
    def __del__(self):
        for _ in range(300):
            self.sleep(0.001)
        print("gone", flush=True)

def join(rank):
    groups[rank] = ProcessGroupGloo(store, rank, 2, timedelta(minutes=2))

def begin():
    tensor = torch.ones(1)
    tensor.holds = SlowToGo()
    groups[0].allreduce([tensor])

store, groups = HashStore(), {}
threads = [threading.Thread(target=join, args=[rank]) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
begin()
atexit.register(lambda: groups[1].allreduce([torch.ones(1)]).wait())
"""


@needs_names_of_gloo_threads
def test_a_program_ends_after_a_thread_of_a_group_has_dropped_its_tensors():
    ended = subprocess.run(
        [sys.executable, "-c", LATE_DROP], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "gone\n", "")


def test_importing_gradwire_imports_no_numba():
    heavy = "{'numba', 'rich', 'typer'}"
    code = f"import gradwire, gradwire.ddp_comm_hooks, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.full
def test_kernels_compile_where_no_cache_can_be_written(tmp_path):
    """Use the kernels of a read-only install, where numba cannot cache."""
    import shutil
    from pathlib import Path

    import gradwire

    copy = tmp_path / "site" / "gradwire"
    shutil.copytree(Path(gradwire.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = []\n"  # root may write anywhere, so no locator may be found
        "import torch, gradwire.ops as ops\n"
        "assert 'site' in ops.__file__\n"
        "assert ops.absmax(torch.tensor([1.0, -3.0])) == 3"
    )
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


def test_kernels_are_compiled_anew_when_a_file_they_use_has_changed(tmp_path, monkeypatch):
    import numba

    from gradwire.ops.cpu import compiling

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def hits():
        def twice(value):
            return 2 * value

        return sum(compiling.kernel((numba.float32,))(twice).stats.cache_hits.values())

    assert [hits(), hits()] == [0, 1]
    monkeypatch.setattr(compiling, "_sources", lambda: "of another version")
    assert [hits(), hits()] == [0, 1]
