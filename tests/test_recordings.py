"""When a lane on a stream records a task, and what it replays; tests/gpu/recordings.py compares the results.

CUDA graphs are replaced by a stand-in, which notes when one begins, ends and is replayed.
"""

import gc

import pytest
import torch

import gradwire
from gradwire.averaging.job import Job, repeat_key
from gradwire.averaging.scaling import Scaling
from gradwire.buckets import BucketLayout, Memory, Slot
from gradwire.errors import Place
from gradwire.exchanges import Scratch
from gradwire.lanes import Promise, Repeat, RepeatKey, Task, recordings
from gradwire.lanes.recordings import Recordings, may_record
from gradwire.peers import Traffic


class Graph:
    """Stands in for a CUDA graph."""

    log: list[str]

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        assert not gc.isenabled()
        self.log.append("begin")

    def capture_end(self):
        self.log.append("end")

    def replay(self):
        self.log.append("replay")


class Group:
    """Stands in for an NCCL group."""

    def __init__(self, log):
        self.traffic = Traffic()
        self.begin = None
        self._log = log

    def send(self):
        self.traffic.bytes_sent += 10
        self.traffic.num_messages += 1
        if self.begin is None:
            self._log.append("message")
        else:
            self.begin(lambda: self._log.append("message"))


@pytest.fixture
def log(monkeypatch):
    log: list[str] = []
    monkeypatch.setattr(Graph, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return log


@pytest.fixture
def group(log):
    return Group(log)


def task_at(step, key=0, run=None, *, reads_step=False):
    """Return a task that sends one message."""

    def send(flats, group, scratch, on_device):
        assert on_device.item() == step
        group.send()

    layout = object()
    repeat = Repeat(RepeatKey((key,), (layout,)), run or send, lambda: reads_step)
    return Task(lambda *_: (), (Promise(torch.zeros(1)),), Place(0, step, 0, "int4"), repeat=repeat)


def run(recorded, task):
    return recorded.run(task, task.repeat)


def test_a_task_is_recorded_when_it_comes_for_the_third_time(log, group):
    recorded = Recordings(group, Scratch())
    assert [run(recorded, task_at(step)) for step in range(4)] == [False, False, True, True]
    in_recording = ["begin", "end", "replay", "message", "begin", "end", "replay"]
    assert log == [*in_recording, "replay", "message", "replay"]


def test_replays_count_their_messages(log, group):
    recorded = Recordings(group, Scratch())
    for step in range(5):
        run(recorded, task_at(step))
    assert (group.traffic.bytes_sent, group.traffic.num_messages) == (30, 3)


def test_work_that_differs_is_recorded_anew(log, group):
    recorded = Recordings(group, Scratch())
    for step in range(3):
        run(recorded, task_at(step, key="a"))
    assert not run(recorded, task_at(3, key="b"))
    assert run(recorded, task_at(4, key="a"))


def test_kernels_find_the_step_of_each_replay(log, group):
    recorded, seen = Recordings(group, Scratch()), []

    def note(flats, group, scratch, on_device):
        seen.append(on_device)

    for step in range(6):
        run(recorded, task_at(step, run=note, reads_step=True))
    (on_device,) = seen
    assert on_device.item() == 5


def test_a_step_that_the_user_records_is_left_alone(log, group, monkeypatch):
    recorded = Recordings(group, Scratch())
    for step in range(3):
        run(recorded, task_at(step))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not run(recorded, task_at(3))


def test_recordings_that_are_not_used_are_forgotten(log, group):
    recorded = Recordings(group, Scratch())
    for step in range(3):
        run(recorded, task_at(step, key="old"))
    for step in range(200, 203):
        run(recorded, task_at(step, key="new"))
    assert not run(recorded, task_at(203, key="old"))
    assert run(recorded, task_at(204, key="new"))


def test_tasks_that_never_come_twice_do_not_fill_the_memory(log, group, monkeypatch):
    monkeypatch.setattr(recordings, "_NUM_COUNTED", 5)
    recorded = Recordings(group, Scratch())
    for step in range(20):
        assert not run(recorded, task_at(step, key=step))
    assert len(recorded._num_runs) <= 5


def test_an_error_ends_the_recording(log, group):
    recorded = Recordings(group, Scratch())

    def fail(flats, group, scratch, on_device):
        raise ValueError("odd")

    for step in range(2):
        run(recorded, task_at(step))
    with pytest.raises(ValueError, match="odd"):
        run(recorded, task_at(2, run=fail))
    assert log == ["begin", "end"]
    assert group.begin is None
    assert gc.isenabled()


def test_clearing_begins_anew(log, group):
    recorded = Recordings(group, Scratch())
    for step in range(3):
        run(recorded, task_at(step))
    recorded.clear()
    assert not run(recorded, task_at(3))


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_the_environment_turns_recordings_off(monkeypatch, value, expected):
    if value is None:
        monkeypatch.delenv("GRADWIRE_CUDA_GRAPHS", raising=False)
    else:
        monkeypatch.setenv("GRADWIRE_CUDA_GRAPHS", value)
    assert may_record() is expected


@pytest.mark.parametrize(
    ("spec", "same", "other"),
    [
        ("int4", (0, 7), ()),
        ("int2", (0, 7), ()),
        ("acp:rank=1", (3, 5), (4,)),
        ("powersgd:rank=1,start=3", (3, 9), (2,)),
        ("schedule(0=int4; 5=int8)", (5, 9), (4,)),
        ("route(ndim<2=fp32; *=acp:rank=1)", (3, 5), (4,)),
    ],
)
def test_steps_of_the_same_work_have_the_same_key(spec, same, other):
    exchange = gradwire.recipe(spec).exchange
    keys = {exchange.repeats_as(step) for step in same}
    assert len(keys) == 1
    assert None not in keys
    assert not keys & {exchange.repeats_as(step) for step in other}


@pytest.mark.parametrize(
    "spec", ["topk", "int4:rounding=stochastic", "int8:local_size=2", "int4:momentum=0.9"]
)
def test_work_that_may_differ_in_every_step_has_no_key(spec):
    assert gradwire.recipe(spec).exchange.repeats_as(3) is None


def slot(name):
    return Slot(name, 0, torch.Size([2]), (1,))


def test_the_key_changes_with_the_place_of_a_state():
    memory, cpu = Memory(), torch.device("cpu")
    layouts = [
        BucketLayout.packed(0, torch.float32, slots) for slots in ([slot("w")], [slot("v"), slot("w")])
    ]
    exchange = gradwire.recipe("int4").exchange
    flat = torch.zeros(4)

    def key(layout=layouts[0]):
        job = Job(Promise(flat), layout, Place(0, 5, 0, "int4"), exchange, Scaling("mean"), is_last=True)
        return repeat_key([job], memory, may_have_unused=False)

    def keep(layout):
        memory.flat("residual", layout, torch.float32, cpu)

    keep(layouts[0])
    first = key()
    keep(layouts[0])
    assert key() == first
    assert key(layouts[1]) != first
    changes = [
        lambda: keep(layouts[1]),
        lambda: memory.load_state_dict(memory.state_dict(), cpu),
        lambda: memory.drop("residual", layouts[0], torch.float32),
        memory.keep_gradient_states,
    ]
    seen = {first}
    for change in changes:
        change()
        assert key() not in seen
        seen.add(key())
