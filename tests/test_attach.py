"""`attach`: what it refuses, what ranks agree on, and what it leaves behind if it fails."""

import functools
import os
import re
import threading
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp import ddp_attachment_of
from gradwire.ddp.options import Options
from gradwire.ddp_comm_hooks import default_hooks, powerSGD_hook
from gradwire.ddp_comm_hooks.debugging_hooks import noop_hook
from gradwire.peers import connecting, rendezvous, timeout_of
from gradwire.peers.agreement import agree
from gradwire.peers.rendezvous import join_rendezvous, next_rendezvous
from gradwire.testing import run_ranks
from gradwire.torch_private import PrefixStore, store_of
from tests.clocks import WaitingClock
from tests.logs import logged
from tests.models import backward, gradients, small_model
from tests.threads import lasting_threads

# --- what is refused ---


def frozen():
    model = small_model()
    model.requires_grad_(False)
    return model


def with_a_hook():
    model = small_model()
    model.register_comm_hook(None, torch_hooks.allreduce_hook)
    return model


def with_a_builtin_hook():
    model = small_model()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model


def with_a_python_reducer():
    model = small_model()
    model._use_python_reducer = True
    return model


def group_of_its_own():
    return {"state": dist.new_group()}


NO_RECIPE = "a recipe is text, .* or a gradwire.Recipe, not .*"
# name: (what makes the model, the recipe, further arguments or what makes them, type and text of the error)
REFUSED = {
    "a module": (lambda: nn.Linear(2, 2), "bf16", {}, TypeError, "Linear; .* or shard it with fully_shard"),
    "text for a model": (lambda: "model", "bf16", {}, TypeError, "takes a DistributedDataParallel, not str"),
    "an unknown name": (small_model, "bf61", {}, ValueError, "no recipe 'bf61'; did you mean 'bf16'"),
    "a number": (small_model, 16, {}, TypeError, f"{NO_RECIPE}int, 16"),
    "nothing": (small_model, None, {}, TypeError, f"{NO_RECIPE}None"),
    # These can be called, but are no hooks.
    "a factory of recipes": (small_model, gradwire.bf16, {}, TypeError, f"{NO_RECIPE}function, bf16"),
    "a class": (small_model, dict, {}, TypeError, f"{NO_RECIPE}class, dict"),
    "a state": (small_model, "bf16", {"state": object()}, TypeError, "recipe bf16 takes no state"),
    "another group": (small_model, "bf16", group_of_its_own, ValueError, "but not the model's own"),
    "a timeout in seconds": (
        small_model,
        "bf16",
        {"timeout": 5},
        TypeError,
        r"timeout must be a datetime.timedelta, not 5",
    ),
    "a timeout that is over": (
        small_model,
        "bf16",
        {"timeout": timedelta(0)},
        ValueError,
        "timeout must be more than 0 seconds, not 0",
    ),
    "a model with a hook": (
        with_a_hook,
        "bf16",
        {},
        ValueError,
        "has a hook already, .*allreduce_hook, and DDP takes one in its life",
    ),
    "a model with a hook of DDP's own": (
        with_a_builtin_hook,
        "bf16",
        {},
        ValueError,
        "has a hook of DDP's own already, .*FP16_COMPRESS",
    ),
    "a model that was frozen": (
        frozen,
        "bf16",
        {},
        ValueError,
        "no parameter of this model requires a gradient any more",
    ),
    "a model in two of them": (
        lambda: DistributedDataParallel(small_model()),
        "bf16",
        {},
        ValueError,
        "the .module of this DistributedDataParallel is a DistributedDataParallel too",
    ),
    "a model with one inside": (
        lambda: DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), small_model())),
        "bf16",
        {},
        ValueError,
        "the .module.1 of this DistributedDataParallel is a DistributedDataParallel too",
    ),
    "a Python reducer": (with_a_python_reducer, "bf16", {}, ValueError, "Python reducer"),
}


def check_ignored_inside(rank):
    """A model inside, which averages by itself what the outer one ignores, is not averaged twice."""
    inside = small_model()
    whole = nn.Sequential(nn.Linear(4, 4), inside)
    names = [name for name, _ in whole.named_parameters() if name.startswith("1.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, names)
    with gradwire.attach(DistributedDataParallel(whole), "bf16") as wire:
        assert wire.recipe.name == "bf16"


def test_a_model_inside_that_the_outer_one_ignores_is_taken(two_ranks):
    two_ranks.run(check_ignored_inside)


def check_refusal(rank, name):
    make_model, recipe, options, kind, text = REFUSED[name]
    options = options() if callable(options) else options
    with pytest.raises(kind, match=text):
        gradwire.attach(make_model(), recipe, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(name, two_ranks):
    two_ranks.run(check_refusal, name)


def check_unfrozen(rank):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    with logged() as texts, gradwire.attach(model, "bf16"):
        pass
    assert not any("frozen" in text for text in texts)
    net[0].requires_grad_(True)
    with logged() as texts, gradwire.attach(model, "bf16"):
        pass
    told = [text for text in texts if text.startswith("2 trained parameter(s) were frozen when")]
    assert len(told) == (rank == 0), texts


def test_parameters_that_were_unfrozen_too_late_are_told(two_ranks):
    two_ranks.run(check_unfrozen)


def check_second_attach(rank):
    model = small_model()
    wire = gradwire.attach(model, "bf16")
    with pytest.raises(ValueError, match=re.escape("bf16 is attached to this model already; call detach()")):
        gradwire.attach(model, "fp16")
    wire.detach()
    wire.detach()  # twice does no harm


def test_a_model_that_has_a_wire_is_refused(two_ranks):
    two_ranks.run(check_second_attach)


def test_hooks_are_compared_over_ranks_where_that_has_a_way():
    options = Options(verify_every=5)
    for where, is_nccl in (("cpu", False), ("cuda", True)):
        options.check(torch_hooks.allreduce_hook, torch.device(where), is_nccl=is_nccl)
    with pytest.raises(ValueError, match="verify_every= with a hook on cuda needs NCCL"):
        options.check(torch_hooks.allreduce_hook, torch.device("cuda"), is_nccl=False)


_calls = []


def averaging(state, bucket):
    _calls.append(bucket.index())
    return torch_hooks.allreduce_hook(state, bucket)


@functools.wraps(noop_hook)
def wrapper(state, bucket):
    return averaging(state, bucket)


class Proxy:
    def __call__(self, state, bucket):
        return averaging(state, bucket)

    def __getattr__(self, name):
        return getattr(default_hooks.fp16_compress_hook, name)


# Hooks that look like ours, and are not.
LOOKALIKES = {
    "a wrapper": lambda: wrapper,
    "a proxy": Proxy,
    "a mock, which has every attribute": lambda: Mock(side_effect=averaging),
}


def check_lookalike(rank, name):
    plain, model = small_model(), small_model()
    backward(plain)
    _calls.clear()
    with gradwire.attach(model, LOOKALIKES[name](), state=model.process_group):
        backward(model)
    assert torch.equal(gradients(model), gradients(plain))
    assert _calls


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_hook_that_was_made_of_ours_is_called_and_not_taken_for_it(name, two_ranks):
    two_ranks.run(check_lookalike, name)


def check_disagreement(rank):
    model = small_model()
    with pytest.raises(ValueError, match="ranks call gradwire.attach with different things") as caught:
        gradwire.attach(model, "bf16" if rank else "fp16")
    assert str(caught.value).endswith("recipe is fp16 on rank(s) 0, bf16 on rank(s) 1, 2")
    with gradwire.attach(model, "bf16"):
        backward(model)


def test_ranks_that_attach_different_things_are_all_told_so(three_ranks):
    three_ranks.run(check_disagreement)


def check_failure_of_one(rank):
    model = small_model()
    if rank == 1:
        with pytest.raises(ValueError, match="no recipe"):
            gradwire.attach(model, "nonsense")
    else:
        with pytest.raises(RuntimeError, match="attach failed on rank 1: there is no recipe 'nonsense'"):
            gradwire.attach(model, "bf16")
    with gradwire.attach(model, "bf16"):
        backward(model)


def test_ranks_learn_that_attach_has_failed_on_another(three_ranks):
    three_ranks.run(check_failure_of_one)


def check_failure_that_is_no_text(rank):
    error = ValueError(os.fsdecode(b"cannot read weights-\xff.bin"))
    group, timeout = dist.group.WORLD, timedelta(seconds=120)
    if rank == 1:
        agree(group, join_rendezvous(group, timeout, "attach"), error, timeout, "gradwire.attach")
    else:
        with pytest.raises(RuntimeError, match=r"failed on rank 1: cannot read weights-\\udcff\.bin"):
            agree(
                group,
                join_rendezvous(group, timeout, "attach"),
                {"recipe": "bf16"},
                timeout,
                "gradwire.attach",
            )


def test_an_error_with_the_name_of_a_file_that_is_no_text_reaches_other_ranks(three_ranks):
    three_ranks.run(check_failure_that_is_no_text)


def is_open(path):
    return str(path) in {
        os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
    }


def job_without_a_trace(rank, folder):
    """Fail to attach in several ways: model, state and disk change only when all ranks agree."""
    model, told = small_model(), []
    first = gradwire.attach(model, "bf16")
    ddp_attachment_of(first).give_way(lambda: told.append("gave way"))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    path = folder / f"{rank}.jsonl"
    telemetry = gradwire.Telemetry(jsonl=str(folder / "{rank}.jsonl"))
    hook = powerSGD_hook.powerSGD_hook

    def attach(model, what=hook, **options):
        return gradwire.attach(model, what, state=state, telemetry=telemetry, **options)

    def assert_untouched():
        assert not is_open(path)
        assert not path.exists()
        assert (state.process_group, state._has_names) == (None, False)

    # One rank cannot; then no rank has, and the wire that would have given way goes on.
    with pytest.raises((TypeError, RuntimeError), match="takes no state"):
        attach(model, "int4" if rank else hook)
    assert_untouched()
    assert first.attached
    backward(model)
    with pytest.raises(ValueError, match="verify_every is"):
        attach(model, verify_every=rank)
    assert_untouched()
    assert (first.attached, told) == (True, [])

    # All agree, and something fails after that.
    other, num_threads = small_model(), len(lasting_threads())
    other.register_comm_hook = None  # cannot be called
    with pytest.raises(TypeError, match="not callable"):
        attach(other)
    assert len(lasting_threads()) == num_threads, "its guard ends"
    assert not is_open(path)
    assert (state.process_group, state._has_names) == (None, False)
    del other.register_comm_hook

    attach(model)
    assert (first.attached, told) == (False, ["gave way"])
    assert (state.process_group, state._has_names) == (model.process_group, True)
    assert is_open(path)
    backward(model)
    with pytest.raises(ValueError, match="powerSGD_hook is attached to this model already"):
        attach(model)
    with gradwire.attach(other, "fp32"):  # its slot is free
        backward(other)


def test_an_attach_that_fails_leaves_everything_as_it_was(tmp_path):
    run_ranks(job_without_a_trace, 2, args=(tmp_path,))


def job_half_open(rank):
    model = small_model()

    def fragile(name, store):
        if name.endswith("1/up"):
            raise RuntimeError("no more sockets")
        return PrefixStore(name, store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "PrefixStore", fragile)
        with pytest.raises(RuntimeError, match=f"rank {rank}: gradwire could not connect .*no more sockets"):
            gradwire.attach(model, "bf16")
    assert not [thread for thread in threading.enumerate() if thread.name == "gradwire-connect"]
    with gradwire.attach(model, "bf16"):
        backward(model)


def test_a_lane_that_opens_half_way_closes_again():
    run_ranks(job_half_open, 2)


def job_missing(rank):
    model, store = small_model(), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["done"])
        return
    own = store_of(model.process_group)

    def have_met():
        """Return True if rank 2 has answered rank 0."""
        first = own.get(rendezvous._FIRST_KEY).decode() if own.check([rendezvous._FIRST_KEY]) else ""
        return own.check([rendezvous._answer_key(first, 2)])

    rendezvous.time = WaitingClock(have_met)
    with pytest.raises(
        RuntimeError, match=r"collective, but rank\(s\) 1 of a group of 3 did not call it within 0.3 s"
    ):
        gradwire.attach(model, "bf16", timeout=timedelta(seconds=0.3))
    store.set("done", "")


def test_attach_names_the_rank_that_is_missing():
    run_ranks(job_missing, 3)


def job_late(rank, what):
    model, store = small_model(), dist.distributed_c10d._get_default_store()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank\(s\) 1 of a group of 2 did not call it within 0.3 s"):
            gradwire.attach(model, what, timeout=timedelta(seconds=0.3))
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
        with pytest.raises(RuntimeError, match=r"failed on rank 0: it gave up waiting for rank\(s\) 1"):
            gradwire.attach(model, what)
    with gradwire.attach(model, what):  # together, it works
        backward(model)


@pytest.mark.parametrize("what", ["bf16", torch_hooks.allreduce_hook], ids=["recipe", "hook"])
def test_a_rank_that_comes_too_late_does_not_go_on_alone(what):
    run_ranks(job_late, 2, args=(what,))


def job_rendezvous(rank):
    world = dist.group.WORLD
    names = [next_rendezvous(world, timeout_of(world)) for _ in range(3)]
    assert len(set(names)) == 3
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    assert everyone == [names] * dist.get_world_size()
    # The count is in the store, so a group that is made again there goes on from it.
    assert store_of(world).add(f"gradwire/rendezvous/{rank}", 0) == 3


def test_ranks_meet_under_names_that_are_new_to_the_store():
    run_ranks(job_rendezvous, 3)


def job_forked(rank):
    model = small_model()
    gradwire.attach(model, "bf16")
    backward(model)
    child = os.fork()
    if child == 0:  # what a DataLoader's worker does when it ends
        import atexit

        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    backward(model)


def test_a_forked_child_that_ends_leaves_the_lane_alone():
    run_ranks(job_forked, 2)
