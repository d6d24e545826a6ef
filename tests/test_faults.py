"""What every rank sees when one of them is killed, stopped, raises, is wrong, or does something else."""

import contextlib
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp import attachment_of
from gradwire.ddp.verification import _hash as hash_of
from gradwire.ddp.verification import check_interval
from gradwire.errors import Place
from gradwire.lanes.stream_progress import StreamMark, StreamProgress
from gradwire.peers.agreement import describe_differences
from gradwire.peers.failure import Failure
from gradwire.peers.failure_store import RankStatus
from gradwire.peers.gloo import GlooGroup
from gradwire.peers.groups import PeerUnreachable, gather
from gradwire.peers.main_thread import describe_main_thread
from gradwire.peers.stall_watcher import Progress, StallWatcher
from gradwire.recipes import fingerprint
from gradwire.testing import RanksFailed, run_ranks, send_message

TIMEOUT_S = 8.0  # no rank of a busy machine stands still for so long
FAULTY_STEP = 3  # DDP has rebuilt its buckets, and every step is exchanged as it arrives


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))


def model_of(group=None, **options):
    return DistributedDataParallel(net(), bucket_cap_mb=0.001, process_group=group, **options)


def backward(model, step=0):
    model.zero_grad()
    torch.manual_seed(100 * dist.get_rank() + step)
    model(torch.randn(4, 10)).square().mean().backward()


def raised_by(act, kind=gradwire.WireError):
    """The text of the error, which comes within the timeout of the group and some seconds more."""
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        act()
    assert time.monotonic() - begin < TIMEOUT_S + 6, "that took too long"
    return str(caught.value)


# --- ranks that die, and ranks that stand still ---


class Deadly:
    """An exchange in the middle of which ``action`` is called, when there is one."""

    communicates = True
    kernels = gradwire.fp32().exchange.kernels
    action = None

    def __repr__(self):
        return "Deadly()"

    def shared_bytes(self, layout, step):
        return 0

    def rounds(self, flat, context):
        if self.action is not None and context.layout.index == 1:
            # A round that the others wait in: they have this rank's chunk, and send theirs in vain.
            messages = context.group.post([flat[:1].clone() for _ in range(context.group.size)])
            messages.send((context.group.rank + 1) % context.group.size, flat[:1])
            self.action()
        yield from gradwire.fp32().exchange.rounds(flat, context)


def end_me(how):
    """Kill or stop this process; what is stopped is killed in the end by `run_ranks`."""
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    time.sleep(60)


# name: (how, the faulty rank, where, what is attached). Rank 0 of each case hosts its store.
KILLED = {
    "in compute": ("kill", 1, "compute", "fp32"),
    "in an exchange, with the store": ("kill", 0, "exchange", "deadly"),
    "with a hook": ("kill", 1, "compute", "hook"),
}
KILLED_RARELY = {
    "in an exchange": ("kill", 1, "exchange", "deadly"),
    "in compute, with the store": ("kill", 0, "compute", "fp32"),
    "with a hook and the store": ("kill", 0, "compute", "hook"),
}
STALLED = {
    "stopped in an exchange": ("stop", 1, "exchange", "deadly"),
    "stopped, with the store": ("stop", 0, "compute", "fp32"),
    "raised in its own forward pass, and alive": ("raise", 1, "compute", "fp32"),
}
STALLED_RARELY = {
    "busy elsewhere": ("busy", 1, "compute", "fp32"),
    "stopped in compute": ("stop", 1, "compute", "fp32"),
    "stopped, with a hook": ("stop", 1, "compute", "hook"),
    "busy elsewhere, with a hook": ("busy", 1, "compute", "hook"),
}
FAULTS = {**KILLED, **KILLED_RARELY, **STALLED, **STALLED_RARELY}
SIZE = 3


def start_anew(case, rank, size):
    """Leave the group that `run_ranks` made for one of this case alone, whose store rank 0 hosts."""
    parents = PrefixStore(case, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        parents.set("port", str(store.port))
    else:
        store = TCPStore("127.0.0.1", int(parents.get("port")), is_master=False)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return parents


def join_rendezvous(store, size):
    """Wait until all cases have come this far: a machine that still starts ranks is slow."""
    store.add("ready", 1)
    while store.add("ready", 0) < size:
        time.sleep(0.05)


def job_fault(world_rank, names):
    case, rank = names[world_rank // SIZE], world_rank % SIZE
    how, faulty, where, what = FAULTS[case]
    parents = start_anew(case, rank, SIZE)
    deadly, model = Deadly(), model_of()
    attached = {"deadly": gradwire.Recipe("deadly", deadly), "hook": torch_hooks.allreduce_hook}
    gradwire.attach(model, attached.get(what, what))
    for step in range(FAULTY_STEP):
        backward(model, step)
    join_rendezvous(parents.underlying_store, len(names) * SIZE)
    if rank == faulty:
        parents.set("pid", str(os.getpid()))
        if how == "busy":
            parents.wait(["over"])  # as a rank does that is stuck in its data
        elif how == "raise":
            try:
                model(torch.randn(4, 11))
            except RuntimeError:
                parents.wait(["over"])  # as one that is in a debugger, or cleans up
        elif where == "exchange":
            deadly.action = lambda: end_me(how)
        else:
            end_me(how)
    text = raised_by(lambda: backward(model, FAULTY_STEP))
    again = raised_by(lambda: backward(model, FAULTY_STEP + 1))
    assert again == text, "a failed wire stays failed"
    send_message(text)
    if rank != faulty:
        parents.add("raised", 1)
        while parents.add("raised", 0) < SIZE - 1:
            time.sleep(0.05)
        parents.set("over", "")
        if how == "stop":
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(parents.get("pid")), signal.SIGKILL)


def texts_of(faults):
    """By case, what the ranks that are left have raised."""
    names, told = list(faults), {name: [] for name in faults}

    def note(rank, text):
        told[names[rank // SIZE]].append(text)

    errors = {}
    try:
        run_ranks(job_fault, len(names) * SIZE, timeout=60, args=(names,), on_message=note)
    except RanksFailed as failed:
        errors = failed.errors
    dead = {i * SIZE + rank for i, (how, rank, *_) in enumerate(faults.values()) if how in ("kill", "stop")}
    assert set(errors) == dead, "\n".join(errors.values())
    assert all("ended with signal SIGKILL" in text for text in errors.values())
    return told


RARELY = pytest.mark.full


@pytest.mark.parametrize("faults", [KILLED, pytest.param(KILLED_RARELY, marks=RARELY)], ids=["", "rarely"])
def test_a_killed_rank_is_an_error_on_all_others_with_rank_step_and_bucket(faults):
    for name, texts in texts_of(faults).items():
        _, faulty, _, what = faults[name]
        assert len(texts) == SIZE - 1
        for text in texts:
            assert re.match(rf"rank \d, step {FAULTY_STEP}, bucket \d, hook ", text), text
            if what != "hook":  # where the hook's own group says what is wrong
                assert f"no message from rank {faulty}" in text
                host_gone = "The group's store does not answer" in text
                assert host_gone if faulty == 0 else f"Furthest behind is rank {faulty}" in text
            assert "Raise the timeout" not in text, "nobody has waited for long"


@pytest.mark.parametrize("faults", [STALLED, pytest.param(STALLED_RARELY, marks=RARELY)], ids=["", "rarely"])
def test_when_the_timeout_strikes_the_rank_furthest_behind_is_named(faults):
    for name, texts in texts_of(faults).items():
        how, faulty, _, _ = faults[name]
        lives = how in ("busy", "raise")
        assert len(texts) == SIZE - 1 + lives
        for text in texts:
            assert re.match(rf"rank \d, step {FAULTY_STEP}, bucket \d, hook ", text), text
            host_gone = "The group's store does not answer" in text
            assert host_gone if faulty == 0 else f"Furthest behind is rank {faulty}" in text, text
            assert host_gone or "Raise the timeout of init_process_group if it is only slow" in text
            if lives:
                last = (
                    f"Rank {faulty} has averaged step {FAULTY_STEP - 1}, bucket 1 and started no bucket since"
                )
                doing = "handles RuntimeError: mat1 and mat2 .*, at" if how == "raise" else "is at"
                assert re.search(
                    rf"{last}; its main thread {doing} \S+test_faults.py:\d+ in job_fault\.", text
                )


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


def test_a_lane_that_stands_still_says_so_before_the_timeout_ends_the_process(caplog):
    failure = Failure(None, "")
    failure.store = store = Posted({1: RankStatus(6, 2, is_done=True)})
    watch = StallWatcher(failure, 1000, lambda: None, "test")
    watch.end()
    place, now = Place(0, 7, 1, "int8"), time.monotonic()
    try:
        watch._act(Progress(place, False, now - 400))
        assert 0 not in store.statuses, "nothing is posted while all goes well"
        watch._act(Progress(place, False, now - 600, waits_for=1))
        assert store.statuses[0] == RankStatus(7, 1, waits_for=1)
        assert not caplog.records
        for _ in range(2):
            watch._act(Progress(place, False, now - 800, waits_for=1))
        (record,) = caplog.records  # once
        assert record.getMessage() == (
            "rank 0, step 7, bucket 1, hook int8: no progress for 800 s. Rank 1 has averaged step 6, bucket "
            "2 and started no bucket since. Furthest behind is rank 1; see what it does there. Raise the "
            "timeout of init_process_group if it is only slow"
        )
        watch._act(Progress(place, True, now))
        assert 0 not in store.statuses, "what is not true any more is withdrawn"
        watch._act(Progress(place, True, now - 900))
        assert store.statuses[0].doing.startswith("its main thread is at ")
        assert len(caplog.records) == 1, "a rank may rest as long as it likes"
        store.text = "rank 1, step 7, bucket 1, hook int8: KeyError: 'lost'"
        watch._act(Progress(place, False, now - 800))
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
    assert explained(late, {1: busy}).endswith(f"Furthest behind is rank 1; see what it does there{is_slow}")
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

    def told(num_marks, since=-100.0, running=None):
        marks = StreamProgress(patience_s=1.0)
        for bucket in range(num_marks):
            place = Place(0, 3, bucket, "int8")
            marks.add(StreamMark(place, Events(reached=bucket < 2), None, time.monotonic() + since + bucket))
        marks.running = running
        progress = marks.look()
        return None if progress.place is None else progress.place.bucket, progress.is_done

    assert told(0) == (None, True)
    assert told(4) == (2, False)
    assert told(2) == (1, True)
    # A bucket that the host is at, and one that came a moment ago, when the device is not asked.
    assert told(2, running=(Place(0, 3, 2, "int8"), 0.0)) == (2, False)
    assert told(4, since=-3.5) == (3, True)


# --- ranks that raise ---


class Raising:
    """Averages as fp32 does, until a rank raises."""

    communicates = True
    kernels = gradwire.fp32().exchange.kernels

    def __repr__(self):
        return "Raising()"

    def shared_bytes(self, layout, step):
        return 0

    def rounds(self, flat, context):
        if context.group.rank == 1 and context.step == FAULTY_STEP and context.layout.index == 1:
            raise FloatingPointError("overflow")
        yield from gradwire.fp32().exchange.rounds(flat, context)


def raising_hook(where):
    num_calls = 0

    def fail(done):
        raise KeyError("lost")

    def hook(group, bucket):
        nonlocal num_calls
        num_calls += bucket.index() == 0
        fails = dist.get_rank() == 1 and num_calls == FAULTY_STEP + 1 and bucket.index() == 1
        if fails and where == "call":
            fail(None)
        future = torch_hooks.allreduce_hook(group, bucket)
        return future.then(fail) if fails else future

    return hook


def job_raise(rank):
    cases = {
        "overflow": (gradwire.Recipe("raising", Raising()), FloatingPointError),
        "in the hook": (raising_hook("call"), KeyError),
        "in its callback": (raising_hook("callback"), KeyError),
    }
    for name, (what, kind) in cases.items():
        group = dist.new_group()  # an allreduce that some ranks never join must not meet the next case's
        model = model_of(group)
        gradwire.attach(model, what, state=group)

        def train(model=model):
            for step in range(FAULTY_STEP + 2):  # one whose own gradients had come learns of it a step later
                backward(model, step)

        with pytest.raises(gradwire.WireError) as caught:
            train()
        assert str(caught.value).startswith(f"rank 1, step {FAULTY_STEP}, bucket 1, hook "), name
        assert kind.__name__ in str(caught.value)
        assert isinstance(caught.value, kind if rank == 1 else gradwire.PeerError)


def test_an_error_on_one_rank_is_raised_on_all_with_its_place_and_text():
    run_ranks(job_raise, 3, timeout=30)


# --- ranks whose gradients are wrong ---


class Corrupting:
    """Averages as fp32 does, and then changes one value on one rank."""

    communicates = True
    kernels = gradwire.fp32().exchange.kernels

    def __repr__(self):
        return "Corrupting()"

    def shared_bytes(self, layout, step):
        return 0

    def rounds(self, flat, context):
        yield from gradwire.fp32().exchange.rounds(flat, context)
        corrupt(flat, context.step, [slot.name for slot in context.layout.slots])


def corrupt(flat, step, names):
    """The last bit of the last value."""
    if dist.get_rank() == 1 and step >= FAULTY_STEP and "0.weight" in names:
        flat.view(torch.int32)[-1] ^= 1


def corrupting_hook():
    num_steps = 0

    def hook(group, bucket):
        nonlocal num_steps
        num_steps += bucket.index() == 0

        def change(done, step=num_steps - 1):
            corrupt(done.value()[0], step, ["0.weight"] if bucket.is_last() else [])
            return done.value()[0]

        flat = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(flat, async_op=True).get_future().then(change)

    return hook


def job_corrupt(rank):
    for what in (gradwire.Recipe("corrupting", Corrupting()), corrupting_hook()):
        model = model_of()
        with gradwire.attach(model, what, verify_every=2):
            for step in range(FAULTY_STEP + 1):  # it is not looked at in step 3
                backward(model, step)
            text = raised_by(lambda model=model: backward(model, FAULTY_STEP + 1))
        # The last bucket holds the first parameters, and the weight lies behind the bias.
        assert text.startswith(f"rank {rank}, step {FAULTY_STEP + 1}: the averaged gradient of 0."), text
        assert "is not the same on every rank: one on rank(s) 0, 2, another on rank(s) 1." in text

    # What is the same is left alone, whatever it is.
    for recipe, unused in (
        ("bf16", False),
        ("fp32:reduction=sum", True),
        (torch_hooks.allreduce_hook, False),
    ):
        model = model_of(find_unused_parameters=unused)
        with gradwire.attach(model, recipe, verify_every=1), model.join():
            for step in range(2 + rank):
                if step == 1:
                    model.module[4].weight.register_hook(lambda grad: grad * torch.inf)
                with model.no_sync():
                    backward(model, step)
                backward(model, step)


def test_a_gradient_that_differs_is_an_error_on_all_ranks_with_its_name():
    run_ranks(job_corrupt, 3, timeout=30)


def test_verify_every_is_a_number_of_steps():
    for wrong, kind in ((-1, ValueError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(kind, match="verify_every must be"):
            check_interval(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_hash_depends_on_every_bit_of_every_value(dtype):
    values = torch.randn(40, dtype=dtype)
    bits = values.view(torch.uint8).clone()
    hashes = {hash_of(values).item()}
    for byte in range(bits.numel()):
        for bit in range(8):
            changed = bits.clone()
            changed[byte] ^= 1 << bit
            hashes.add(hash_of(changed.view(dtype)).item())
    assert len(hashes) == 1 + 8 * bits.numel()
    assert hash_of(values.flip(0)) not in hashes


# --- ranks that disagree ---


def job_disagree(rank):
    def refused(**changes):
        """What all ranks are told when rank 1 attaches something else."""
        options = {"recipe": "bf16", **(changes if rank == 1 else {})}
        with pytest.raises(ValueError, match="ranks call gradwire.attach with different things: ") as caught:
            gradwire.attach(model_of(), **options)
        return str(caught.value).partition("things: ")[2]

    assert refused(recipe="fp16") == "recipe is fp16 on rank(s) 1, bf16 on rank(s) 0, 2"
    told = "recipe is bf16:reduction=sum on rank(s) 1, bf16 on rank(s) 0, 2"
    assert refused(recipe="bf16:reduction=sum") == told
    assert refused(on_nonfinite="skip") == "on_nonfinite is skip on rank(s) 1, propagate on rank(s) 0, 2"
    assert refused(verify_every=5) == "verify_every is 5 on rank(s) 1, 0 on rank(s) 0, 2"

    version = fingerprint.__version__
    fingerprint.__version__ = "0.2" if rank == 1 else "0.1"
    assert refused() == "gradwire is 0.2 on rank(s) 1, 0.1 on rank(s) 0, 2"
    fingerprint.__version__ = version

    names = ["a", "b"] if rank != 1 else ["b", "a"]
    layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
    with pytest.raises(
        ValueError, match=r"parameter 0 is b\.weight, shape \(4, 4\), float32 on rank\(s\) 1, a"
    ):
        gradwire.attach(DistributedDataParallel(layers), "fp32")
    # Recipes of one name, but not the same.
    exchange = replace(gradwire.bf16().exchange, seed=7 if rank == 1 else 0)
    with pytest.raises(ValueError, match=r"recipe\.exchange\.seed is 7 on rank\(s\) 1, 0 on rank\(s\) 0, 2"):
        gradwire.attach(model_of(), gradwire.Recipe("mine", exchange))

    model = model_of()
    wire = gradwire.attach(model, "fp32")
    with pytest.raises(ValueError, match=r"call Wire.swap with .*recipe is fp16 on rank\(s\) 1, bf16 on"):
        wire.swap("fp16" if rank == 1 else "bf16")


def test_ranks_that_attach_different_things_are_told_who_differs_in_what():
    run_ranks(job_disagree, 3, timeout=30)


def job_other_buckets(rank):
    """Without a rebuild, DDP leaves each rank the buckets that it was told to make."""
    for what in ("fp32", torch_hooks.allreduce_hook):
        group = dist.new_group()
        cap = 25 if rank == 1 else 0.001
        model = DistributedDataParallel(
            net(), bucket_cap_mb=cap, find_unused_parameters=True, process_group=group
        )
        gradwire.attach(model, what)
        text = raised_by(lambda model=model: backward(model))
        assert text.startswith(f"rank {rank}, step 0, bucket 0, hook "), text
        assert "ValueError: ranks do not agree: bucket 0 is shape (1322,), float32 of 6" in text
        assert " parameters on rank(s) 1, shape (92,), float32 of 3 parameters on rank(s) 0, 2; " in text, (
            text
        )

    # Ranks that disagree without knowing it do not end the process, as Gloo would.
    group = GlooGroup(dist.group.WORLD.get_group_store(), "sizes", rank, 3, timedelta(seconds=1))
    rows = [torch.zeros(100 if rank == 1 else 8, dtype=torch.uint8) for _ in range(3)]
    with pytest.raises(PeerUnreachable, match="no message from rank"):
        gather(rows, group)
    group.close()

    # Once all have agreed, nothing is sent but gradients.
    model = model_of()
    with gradwire.attach(model, "fp32") as wire:
        workers = attachment_of(wire).engine._lane._pool.workers
        sent, before = [], 0
        for step in range(5):
            backward(model, step)
            so_far = sum(worker.group.traffic.num_messages for worker in workers)
            sent.append(so_far - before)
            before = so_far
        expected = [sum(b.num_messages for b in step.buckets) for step in wire.stats().steps]
    assert sent[-2:] == expected[-2:]
    assert sent[0] == expected[0] + 2, "one message to each other rank, for one bucket"


def test_ranks_with_different_buckets_are_told_so_before_anything_is_sent():
    run_ranks(job_other_buckets, 3, timeout=30)


def test_what_differs_is_told_briefly():
    claims = [{"a": "1", "a.b": "2", "c": "3"}, {"a": "1", "a.b": "2", "c": "3"}]
    claims.append({"a": "4", "a.b": "5"})
    expected = "a is 4 on rank(s) 2, 1 on rank(s) 0, 1; c is absent on rank(s) 2, 3 on rank(s) 0, 1"
    assert describe_differences(claims) == expected
    many = [{str(n): str(rank) for n in range(10)} for rank in range(2)]
    assert describe_differences(many).endswith("; and 7 more")
