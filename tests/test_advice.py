"""Errors and logs that tell a user what to do."""

import logging
import os
import sys
import threading
from datetime import timedelta

import numba
import pytest
import torch
import torch.distributed as dist
from numba.core import caching
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import gradwire
from gradwire import ops
from gradwire.ddp import unwrap
from gradwire.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from gradwire.ops.cpu import compiling
from gradwire.peers import rendezvous
from gradwire.peers.agreement import agree
from gradwire.peers.rendezvous import join_rendezvous
from gradwire.testing import Case, check_hook
from tests.models import backward, gradients, small_model
from tests.test_rendezvous import start, together

# --- models ---


def check_models(rank):
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    others = {
        "DataParallel": DataParallel(nn.Linear(2, 2)),
        r"FullyShardedDataParallel \(FSDP\)": FullyShardedDataParallel(
            nn.Linear(2, 2), device_id=torch.device("cpu")
        ),
        r"fully_shard\(\) \(FSDP2\)": fully_shard(nn.Linear(2, 2), mesh=mesh),
        r"replicate\(\)": replicate(nn.Linear(2, 2)),
    }
    for name, model in others.items():
        with pytest.raises(TypeError, match=f"averaged by {name}.*does not support. Wrap the plain model"):
            gradwire.attach(model, "int4")
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"not Linear: this is the .module of one; attach to the Distributed"):
        gradwire.attach(ddp.module, "int4")
    with pytest.raises(TypeError, match="not Linear; wrap the model in torch.nn.parallel.Distributed"):
        gradwire.attach(nn.Linear(2, 2), "int4")


def test_a_model_of_another_kind_is_refused_with_what_to_wrap_instead(two_ranks):
    two_ranks.run(check_models)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="takes a DistributedDataParallel, not str$"):
        unwrap("model")


# --- recipes ---


@pytest.mark.parametrize("text", ["topk", "nop", "none", "no", "top", "loop", "noob", "zoop", "random"])
def test_no_slip_of_the_pen_suggests_not_to_average(text):
    with pytest.raises(ValueError, match=r"there is no recipe|Recipes:") as caught:
        gradwire.recipe(text)
    assert (
        "did you mean" not in str(caught.value) or "'noop'" not in str(caught.value).partition("Recipes:")[0]
    )


@pytest.mark.parametrize("text", ["int4,feedback=false", "int4;feedback=false", "int4, feedback=false"])
def test_options_after_another_sign_are_suggested_after_a_colon(text):
    with pytest.raises(ValueError, match="did you mean 'int4:feedback=false'"):
        gradwire.recipe(text)


# --- hooks that are there already ---


def check_after_local_sgd(rank):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for warmup_steps in (0, 2):
        with gradwire.LocalSGD(model, optimizer, period=2, warmup_steps=warmup_steps) as local:
            for _ in range(4):
                with pytest.raises(
                    ValueError, match=r"a gradwire.LocalSGD trains this model .* detach\(\) on it"
                ):
                    gradwire.attach(model, "int8")
                backward(model)
                optimizer.step()
                local.step()
    with (
        gradwire.attach(model, "int8"),
        pytest.raises(ValueError, match="int8 is attached to this model already"),
    ):
        gradwire.attach(model, "int4")


def test_attach_names_the_local_sgd_that_has_the_model(two_ranks):
    two_ranks.run(check_after_local_sgd)


def check_second_registration(rank):
    for first in (DDPCommHookType.BF16_COMPRESS, DDPCommHookType.INT4, DDPCommHookType.POWER_SGD):
        model = small_model()
        register_ddp_comm_hook(first, model)
        for second in (DDPCommHookType.ALLREDUCE, DDPCommHookType.POWER_SGD_RANK2):
            with pytest.raises(RuntimeError, match="can only be called once"):
                register_ddp_comm_hook(second, model)
    model = small_model()
    model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(RuntimeError, match="can only be called once"):
        register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, model)


def test_a_second_registration_raises_what_torch_raises(two_ranks):
    two_ranks.run(check_second_registration)


def check_low_rank_members(rank):
    names = ("POWER_SGD", "POWER_SGD_RANK2", "BATCHED_POWER_SGD", "BATCHED_POWER_SGD_RANK2")
    for name in names:
        plain, other = small_model(), small_model()
        DDPCommHookType[name].value(model=other, state=None, start_powerSGD_iter=2)
        for step in range(4):
            backward(plain, step)
            backward(other, step)
            is_exact = torch.allclose(gradients(plain), gradients(other), rtol=1e-5, atol=1e-7)
            assert is_exact == (step < 2), (name, step)


def test_every_low_rank_member_takes_the_step_at_which_it_starts(two_ranks):
    two_ranks.run(check_low_rank_members)


def list_itself(state, bucket):
    return [bucket.buffer()]


def future_of_list(state, bucket):
    future = torch.futures.Future()
    future.set_result([bucket.buffer()])
    return future


def future_of_torchs_list(state, bucket):
    return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()


@pytest.mark.parametrize("hook", [list_itself, future_of_list, future_of_torchs_list])
def test_check_hook_says_how_to_see_what_a_hook_has_returned(hook):
    for via, text in (("ddp", "via='attach' says"), ("attach", "list")):
        report = check_hook(hook, via=via, cases=[Case()])
        assert not report.ok
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(str(report))


# --- overlapped optimizers ---


def check_factories(rank):
    model = small_model()
    with gradwire.attach(model, "fp32") as wire:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            TypeError, match=r"function that makes .* \(SGD\): pass lambda params: torch.optim.SGD"
        ):
            gradwire.overlap_optimizer(wire, optimizer)
        with pytest.raises(TypeError, match="a function that makes the optimizer from a list .* not float"):
            gradwire.overlap_optimizer(wire, 0.1)


def test_an_optimizer_instead_of_a_function_that_makes_one_is_refused(two_ranks):
    two_ranks.run(check_factories)


def check_missed_steps(rank, skips_on):
    model = small_model()
    wire = gradwire.attach(model, "fp32")
    optimizer = gradwire.overlap_optimizer(wire, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in range(3):
        with model.no_sync():
            model(torch.ones(4, 10)).sum().backward()
        backward(model, step)
        optimizer.step()
        optimizer.step()
    backward(model)
    if rank not in skips_on:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(gradwire.WireError, match=r"backward\(\) runs again before optimizer.step\(\)"):
        for _ in range(3):  # a rank where all went well may learn of it one step later
            backward(model)
            optimizer.step()
    wire.detach()


@pytest.mark.parametrize("skips_on", [(0, 1), (1,)])
def test_a_second_backward_without_a_step_between_is_refused(skips_on, two_ranks):
    two_ranks.run(check_missed_steps, skips_on)


# --- silences ---


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


LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.3)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_waits_long_logs_for_whom(missing, heard, monkeypatch):
    monkeypatch.setattr(rendezvous, "SLOW_S", 0.05)
    members = start(dist.HashStore())
    del members[missing]

    def work(member):
        with pytest.raises(RuntimeError, match="is collective"):
            join_rendezvous(member, SHORT, "gradwire.attach")

    together(work, members)
    assert len(heard.texts) == 2, "each rank logs it once"
    for text in heard.texts:
        assert f"waits in gradwire.attach for rank(s) {missing} of 3" in text


def test_so_does_one_that_waits_for_claims(heard, monkeypatch):
    members = start(dist.HashStore())
    names = together(lambda m: join_rendezvous(m, LONG), members)
    monkeypatch.setattr(rendezvous, "SLOW_S", 0.05)

    def work(member):
        with pytest.raises(RuntimeError, match=r"swap is collective, but rank\(s\) 1, 2 of 3"):
            agree(member, names[0], {}, SHORT, "swap")

    work(members[0])
    (text,) = heard.texts
    assert "rank 0 waits in swap for rank(s) 1, 2 of 3" in text


def test_ranks_that_meet_in_time_log_nothing(heard):
    members = start(dist.HashStore())
    together(lambda m: agree(m, join_rendezvous(m, LONG), {}, LONG), members)
    assert not heard.texts


def test_compiling_kernels_is_announced_when_it_takes_long(heard, monkeypatch):
    monkeypatch.setattr(ops, "_SLOW_S", 0.01)
    monkeypatch.setattr(ops, "_cpu_casts", lambda: heard.event.wait(30))
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
    for damage in (b"", b"no pickle", os.urandom(300)):
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
