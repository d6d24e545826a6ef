"""Logs and lines that say what would otherwise go unnoticed."""

import contextlib
import logging
import os
import random
import re
import sys
import threading
from datetime import timedelta

import numba
import pytest
import torch
import torch.distributed as dist
from numba.core import caching
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import ops
from gradwire.ops.cpu import compiling
from gradwire.peers import rendezvous
from gradwire.peers.agreement import agree
from gradwire.peers.rendezvous import join_rendezvous
from tests.clocks import CountingClock
from tests.logs import logged
from tests.models import small_model
from tests.test_rendezvous import start, together


class Heard(logging.Handler):
    """A handler that keeps texts, and tells when one has come."""

    def __init__(self):
        super().__init__()
        self.texts, self.event = [], threading.Event()

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.event.set()


@pytest.fixture
def heard():
    handler = Heard()
    logging.getLogger("gradwire").addHandler(handler)
    yield handler
    logging.getLogger("gradwire").removeHandler(handler)


LONG, SHORT = timedelta(seconds=120), timedelta(seconds=0.3)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_waits_long_logs_for_whom(missing, heard, monkeypatch):
    monkeypatch.setattr(rendezvous, "SLOW_S", 0.05)
    monkeypatch.setattr(rendezvous, "time", CountingClock())
    members = start(dist.HashStore())
    del members[missing]

    def work(member):
        with pytest.raises(RuntimeError, match="is collective"):
            join_rendezvous(member, SHORT, "gradwire.attach")

    together(work, members)
    assert len(heard.texts) == 2, "each rank logs it once"
    waits = re.compile(r"waits in gradwire\.attach for rank\(s\) ([\d, ]+) of a group of 3")
    found = [waits.search(each) for each in heard.texts]
    assert all(found), heard.texts
    named = [set(each[1].split(", ")) for each in found]
    # A rank may also name one that is on its way, and others ask rank 0 before they ask for the rest.
    assert all(each & {"0", str(missing)} for each in named), heard.texts
    assert any(str(missing) in each for each in named), heard.texts


def test_so_does_one_that_waits_for_claims(heard, monkeypatch):
    members = start(dist.HashStore())
    names = together(lambda m: join_rendezvous(m, LONG, "attach"), members)
    monkeypatch.setattr(rendezvous, "SLOW_S", 0.05)

    def work(member):
        with pytest.raises(RuntimeError, match=r"swap is collective, but rank\(s\) 1, 2 of a group of 3"):
            agree(member, names[0], {}, SHORT, "swap")

    work(members[0])
    (text,) = heard.texts
    assert "rank 0 waits in swap for rank(s) 1, 2 of a group of 3" in text


def test_ranks_that_meet_in_time_log_nothing(heard):
    members = start(dist.HashStore())
    together(lambda m: agree(m, join_rendezvous(m, LONG, "attach"), {}, LONG, "attach"), members)
    assert not heard.texts


def test_compiling_kernels_is_announced_when_it_takes_long(heard, monkeypatch):
    monkeypatch.setattr(ops, "_SLOW_S", 0.01)
    monkeypatch.setattr(ops, "_kernels", lambda device, family: heard.event.wait(120))
    monkeypatch.delitem(sys.modules, "gradwire.ops.cpu.casts", raising=False)
    ops.warm_up(torch.device("cpu"), ["casts"])
    assert "compiles its CPU kernels (casts)" in heard.texts[0]


def doubled(value):
    return 2 * value


def test_a_damaged_kernel_cache_is_named_and_not_used(tmp_path, heard, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compile_it = compiling.kernel(numba.float32(numba.float32))
    assert compile_it(doubled)(2.0) == 4
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert not heard.texts
    for damage in (b"", b"no pickle", random.Random(0).randbytes(300)):
        for ending in ("nbi", "nbc"):
            compiling._tell_cache_unusable.cache_clear()
            before = {file: file.read_bytes() for file in files}
            for file in files:
                if file.name.endswith(ending):
                    file.write_bytes(damage)
            assert compile_it(doubled)(3.0) == 6
            for file, content in before.items():
                file.write_bytes(content)
            assert str(tmp_path) in heard.texts.pop()
            assert not heard.texts
    assert compile_it(doubled)(3.0) == 6
    assert not heard.texts


def test_a_kernel_cache_that_cannot_be_written_is_named_too(tmp_path, heard, monkeypatch):
    def save(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", save)
    compiling._tell_cache_unusable.cache_clear()
    assert compiling.kernel(numba.float32(numba.float32))(doubled)(3.0) == 6
    assert str(tmp_path) in heard.texts[0]
    assert "No space left" in heard.texts[0]
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert compiling.kernel(numba.float32(numba.float32))(doubled)(3.0) == 6
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in heard.texts[1]


def check_disabled(rank):
    os.environ["GRADWIRE_DISABLE"] = "1"
    model = small_model()
    try:
        wire = gradwire.attach(model, "int4")
    finally:
        del os.environ["GRADWIRE_DISABLE"]
    assert str(wire.plan()).startswith("GRADWIRE_DISABLE is set: DDP averages by itself, and nothing of this")
    with gradwire.attach(model, "int4") as wire:
        assert "GRADWIRE_DISABLE" not in str(wire.plan())


def test_the_plan_of_a_disabled_wire_says_that_nothing_of_it_is_sent(two_ranks):
    two_ranks.run(check_disabled)


def check_unaveraged(rank, way):
    model = small_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([torch.zeros(1)], lr=0.1)]
    with logged() as texts, gradwire.attach(model, "int4"):
        for step in range(5):
            with model.no_sync() if way == "no_sync" else contextlib.nullcontext():
                (model.module if way == "module" else model)(torch.ones(4, 10)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            assert len(texts) == (way != "model" and step >= 2)
    if texts:
        assert texts[0].startswith(f"rank {rank}: int4 has averaged nothing, though optimizers have taken 3")
        assert "itself, not its .module" in texts[0]


@pytest.mark.parametrize("way", ["module", "no_sync", "model"])
def test_training_past_a_wire_is_told_once_after_three_steps(way, two_ranks):
    two_ranks.run(check_unaveraged, way)


def check_zero_gradients(rank, sparse):
    """An optimizer of two models trains one of them first; the other has zeros left from a step before."""
    first = small_model()
    second = DistributedDataParallel(torch.nn.EmbeddingBag(7, 3, mode="sum", sparse=sparse))
    tokens = torch.tensor([[1, 2]])
    second(tokens).sum().backward()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with logged() as texts, gradwire.attach(first, "int4"), gradwire.attach(second, "int4"):
        for _ in range(7):
            optimizer.zero_grad(set_to_none=False)
            first(torch.ones(4, 10)).sum().backward()
            optimizer.step()
        assert not texts
        for _ in range(3):
            second.module(tokens).sum().backward()
            optimizer.step()
        assert len(texts) == 1, "from now on it is trained, past its wire"


@pytest.mark.parametrize("sparse", [False, True])
def test_a_model_whose_gradients_are_all_zero_is_not_trained_past_its_wire(sparse, two_ranks):
    two_ranks.run(check_zero_gradients, sparse)


def check_double_momentum(rank, spec, momentum, is_told):
    model = small_model()
    other = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    with logged() as texts, gradwire.attach(model, spec):
        for _ in range(3):
            model(torch.ones(4, 10)).sum().backward()
            other.step()
            optimizer.step()
    assert len(texts) == is_told, texts
    if is_told:
        assert texts[0].startswith(
            f"rank {rank}: topk:momentum=0.9 applies a momentum before it sends, and SGD"
        )
        assert texts[0].endswith("Give the optimizer momentum=0")


@pytest.mark.parametrize(
    ("spec", "momentum", "is_told"),
    [
        ("topk:momentum=0.9", 0.9, True),
        ("topk:momentum=0.9", 0.0, False),
        ("topk", 0.9, False),
        ("route(ndim<2=fp32; *=topk:momentum=0.9)", 0.9, False),
    ],
)
def test_a_momentum_that_is_applied_twice_is_told_once(spec, momentum, is_told, two_ranks):
    two_ranks.run(check_double_momentum, spec, momentum, is_told)


def train_scaled(model, scaler, num_steps=3):
    """Train with a scaler, or without if it is None, and beside a model that has one of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.nn.Linear(2, 2)
    other_scaler, other_optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(num_steps):
        other_scaler.scale(other(torch.ones(4, 2)).sum()).backward()
        other_scaler.step(other_optimizer)
        other_scaler.update()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(4, 10)).sum()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def check_scaler(rank, spec, use, is_told):
    model, scaler = small_model(), torch.amp.GradScaler("cpu", enabled=use != "disabled")
    given = {"given": scaler, "another": torch.amp.GradScaler("cpu")}.get(use)
    with logged() as texts, gradwire.attach(model, spec, grad_scaler=given):
        train_scaled(model, None if use == "none" else scaler)
    assert len(texts) == is_told, texts
    if is_told:
        assert texts[0].startswith(f"rank {rank}: a GradScaler scales the loss, and {spec} was not given it")
        assert "Pass it: gradwire.attach(model, recipe, grad_scaler=scaler)" in texts[0]


@pytest.mark.parametrize(
    ("spec", "use", "is_told"),
    [
        ("int4", "forgotten", True),
        ("topk:momentum=0.9", "forgotten", True),
        ("schedule(0=fp32; 1=int4)", "forgotten", True),
        ("int4", "another", True),
        ("int4", "given", False),
        ("int4", "disabled", False),
        ("int4", "none", False),
        ("int8", "forgotten", False),
        ("schedule(0=fp32; 9=int4)", "forgotten", False),
        ("powersgd:feedback=false", "forgotten", False),
    ],
)
def test_a_scaler_that_a_wire_was_not_given_is_told_once(spec, use, is_told, two_ranks):
    two_ranks.run(check_scaler, spec, use, is_told)


def check_scaler_after_swap(rank):
    model, scaler = small_model(), torch.amp.GradScaler("cpu")
    with logged() as texts, gradwire.attach(model, "noop") as wire:
        train_scaled(model, scaler)
        assert not texts
        wire.swap("int4")
        train_scaled(model, scaler)
    assert [text.partition(":")[0] for text in texts] == [f"rank {rank}"]


def test_so_is_one_after_a_swap_to_a_recipe_that_holds_something_back(two_ranks):
    two_ranks.run(check_scaler_after_swap)


def check_local_steps(rank):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged() as texts, gradwire.LocalSGD(model, optimizer, period=2) as local:
        for _ in range(6):
            model.module(torch.ones(4, 10)).sum().backward()
            optimizer.step()
            local.step()
    assert not texts


def test_local_sgd_may_train_past_its_wire(two_ranks):
    two_ranks.run(check_local_steps)
