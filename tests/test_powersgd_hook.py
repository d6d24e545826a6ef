"""PowerSGD's drop-in face: torch's arguments and meanings, without its defects."""

import copy
import io
import itertools
import logging
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ddp_comm_hooks import DDPCommHookType, default_hooks, register_ddp_comm_hook
from gradwire.ddp_comm_hooks import powerSGD_hook as ours
from gradwire.testing import check_hook, run_ranks
from tests.drawn_buckets import Given, draw, outer
from tests.models import backward, gradients, small_model

BOTH = {"torch": (theirs, torch_default), "gradwire": (ours, default_hooks)}
# Random starts, over which errors are averaged: one alone moves an error by up to 3 %.
SEEDS = range(6)


def train(register, steps, **options):
    """The averaged gradients of each step, given this rank's own, of one model with one bucket."""
    net = Given(*(g.shape for g in steps[0]), **options)
    model = DistributedDataParallel(net)
    register(model)
    seen = []
    for given in steps:
        model.zero_grad()
        model(given).backward()
        seen.append([p.grad.clone() for p in net.values])
    return seen


# --- each defect of torch's, beside ours ---


def with_hook(module, wrapper=None, hook="powerSGD_hook", **options):
    def register(model):
        state = module.PowerSGDState(None, start_powerSGD_iter=2, **options)
        chosen = getattr(module, hook)
        model.register_comm_hook(state, chosen if wrapper is None else wrapper(chosen))

    return register


def attempt(register, steps):
    """Return the result of `train`, or the name of the error it raises."""
    try:
        return train(register, steps)
    except Exception as error:
        return type(error).__name__


def job_defects(rank):
    found = {}
    for name, (module, wrappers) in BOTH.items():
        plain = with_hook(module)
        zero = [[torch.zeros(30, 20), *draw(9, (30, 20))]] * 4
        found[name, "zero"] = attempt(plain, zero)
        found[name, "0-d"] = attempt(plain, [draw(s, (), (30, 20)) for s in range(4)])
        steps = [draw(10 * rank + s, (30, 20)) for s in range(8)]
        if rank == 1:
            steps[3][0][2, 2] = math.inf
        found[name, "inf"] = attempt(plain, steps)
        found[name, "rank-1"] = attempt(
            with_hook(module, matrix_approximation_rank=2), [[outer(1, 30, 20)]] * 4
        )
        found[name, "batched"] = attempt(
            with_hook(module, hook="batched_powerSGD_hook"), [draw(1, (30, 20))] * 4
        )
        small = [[torch.full((20,), 0.05 + 10.0 * (-1) ** rank), *draw(s, (30, 20))] for s in range(150)]
        found[name, "bias"] = attempt(with_hook(module, wrappers.fp16_compress_wrapper), small)[-1]
    return found


def test_what_breaks_torchs_hook_does_not_break_ours():
    ranks = run_ranks(job_defects, 2, timeout=240)
    for found in ranks:
        assert any(grads[0].isnan().any() for grads in found["torch", "zero"])
        assert all(torch.equal(grads[0], torch.zeros(30, 20)) for grads in found["gradwire", "zero"])

        assert found["torch", "0-d"] == "IndexError"
        wanted = draw(3, (), (30, 20))[0]
        assert torch.equal(found["gradwire", "0-d"][3][0], wanted)

        assert not found["torch", "inf"][-1][0].isfinite().any(), "torch's state stays infinite"
        finite = [bool(grads[0].isfinite().all()) for grads in found["gradwire", "inf"]]
        assert finite == [True] * 3 + [False] + [True] * 4, "shown in that step, and in no other"

        gradient = outer(1, 30, 20)
        assert max((grads[0] - gradient).norm() for grads in found["torch", "rank-1"]) > 0.1 * gradient.norm()
        for grads in found["gradwire", "rank-1"]:
            assert torch.allclose(grads[0], gradient, atol=1e-5)

        assert found["torch", "batched"] == "AssertionError"
        assert found["gradwire", "batched"][-1][0].isfinite().all()

        assert not torch.allclose(found["torch", "bias"][0], torch.tensor(0.05), atol=0.02)
        # The mean of 10.05 and -9.95 in fp16 is within the last place of ten.
        assert torch.allclose(found["gradwire", "bias"][0], torch.tensor(0.05), atol=2.0**-7)


def job_sparse(rank):
    result = {}
    for name, (module, _) in BOTH.items():
        torch.manual_seed(0)
        net = nn.Embedding(20, 8, sparse=True)
        model = DistributedDataParallel(net)
        model.register_comm_hook(
            module.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0), module.powerSGD_hook
        )
        try:
            for _ in range(4):
                model.zero_grad()
                model(torch.tensor([rank, rank, 7, 10 + rank])).square().sum().backward()
            result[name] = net.weight.grad.to_dense()
        except Exception as error:
            result[name] = type(error).__name__
    return result


def test_sparse_gradients_are_the_same_on_every_rank():
    first, second = run_ranks(job_sparse, 2)
    assert torch.equal(first["gradwire"], second["gradwire"])
    assert isinstance(first["torch"], str) or not torch.equal(first["torch"], second["torch"])


# --- as good as torch's where that works ---


def job_parity(rank):
    shapes = [(64, 48), (100, 30), (20,)]
    fixed = draw(100 + rank, *shapes)
    decay = [torch.linspace(1, 0.05, shape[-1]).square() for shape in shapes]
    steps = [
        [f * d + 0.1 * n for f, d, n in zip(fixed, decay, draw(10 * s + rank, *shapes), strict=True)]
        for s in range(22)
    ]
    wanted = train(lambda model: None, steps)
    errors = dict.fromkeys(itertools.product(BOTH, (True, False)), 0.0)
    for (name, feedback), seed in itertools.product(errors, SEEDS):
        options = {"matrix_approximation_rank": 4, "use_error_feedback": feedback, "random_seed": seed}
        seen = train(with_hook(BOTH[name][0], **options), steps)
        # With feedback, what a step leaves out comes later: sums over steps agree.
        first = 2 if feedback else 21
        have, want = (
            torch.cat([sum(grads[i] for grads in run[first:]).flatten() for i in range(3)])
            for run in (seen, wanted)
        )
        errors[name, feedback] += float((have - want).norm() / want.norm()) / len(SEEDS)
    return errors


def test_the_mean_error_after_twenty_warm_started_steps_is_torchs():
    for errors in run_ranks(job_parity, 2):
        for feedback in (True, False):
            assert errors["gradwire", feedback] == pytest.approx(errors["torch", feedback], rel=0.01)


# --- the contract, raw and attached ---


def rank_two(group):
    return ours.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)


@pytest.mark.parametrize("via", ["ddp", pytest.param("attach", marks=pytest.mark.full)])
def test_the_hook_keeps_the_contract(via):
    report = check_hook(
        ours.powerSGD_hook,
        rank_two,
        tolerance=0.3,
        floor=1.0,
        feedback=True,
        via=via,
        world_size=3,
        num_roundings=1,
    )
    assert report.ok, report


def test_the_batched_hook_keeps_the_contract():
    report = check_hook(
        ours.batched_powerSGD_hook,
        rank_two,
        tolerance=3.0,
        floor=1.0,
        feedback=True,
        world_size=2,
        num_roundings=1,
    )
    assert report.ok, report


def job_types(rank):
    plain = small_model()
    backward(plain)
    for kind in (k for k in DDPCommHookType if "POWER_SGD" in k.name):
        for state in (None, dist.group.WORLD):
            model = small_model()
            register_ddp_comm_hook(kind, model, state)
            backward(model)
            assert torch.allclose(gradients(model), gradients(plain), rtol=1e-5, atol=1e-7), "not yet started"
    other = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="not the model's own"):
        register_ddp_comm_hook(DDPCommHookType.POWER_SGD, small_model(), other)
    model = small_model()
    model.register_comm_hook(dist.group.WORLD, ours.powerSGD_hook)
    with pytest.raises(TypeError, match=r"must be a gradwire\..*PowerSGDState, not .*ProcessGroup"):
        backward(model)

    state, model = rank_two(None), small_model()
    gradwire.attach(model, ours.powerSGD_hook, state=state)
    for seed in range(5):
        assert state.iter == seed
        backward(model, seed)
    rate, before, after = state.compression_stats()
    numel = sum(p.numel() for p in model.parameters())
    assert (before, rate) == (3 * numel, before / after)
    # Of 30x10, 30x30, 30x30 and 2x30 the last does not pay at rank 2; a matrix becomes 2 (rows + columns).
    assert after == 3 * (numel - 300 - 2 * 900 + 2 * 40 + 2 * 2 * 60)
    assert set(state.state_dict()["memory"]["residual"]) == {"0.weight", "2.weight", "4.weight"}


def test_types_states_and_their_figures():
    run_ranks(job_types, 2)


# --- options, pickles, resumes ---


def test_a_start_before_step_two_is_refused_as_torch_does():
    for module, text in ((theirs, "start_powerSGD_iter"), (ours, "start_powerSGD_iter=1 is too early")):
        for options in ({"use_error_feedback": False}, {"warm_start": False}, {}):
            with pytest.raises(ValueError, match=text):
                module.PowerSGDState(None, start_powerSGD_iter=1, **options)
        module.PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
    with pytest.raises(ValueError, match="rank must be at least 1, not 0"):
        ours.PowerSGDState(None, matrix_approximation_rank=0)


def test_a_pickle_leaves_the_group_out_and_says_so(caplog):
    state = ours.PowerSGDState(None, matrix_approximation_rank=3, random_seed=7)
    state.iter = 12
    with caplog.at_level(logging.WARNING, "gradwire"):
        again = pickle.loads(pickle.dumps(state))
    assert ["without its own" in caplog.text, "set its process_group" in caplog.text] == [True, True]
    assert (again.iter, again.matrix_approximation_rank, again.random_seed) == (12, 3, 7)
    assert again.process_group is None
    assert copy.copy(again).iter == 12


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("memory"), "it has no 'memory'"),
        (lambda state: state.update(momentum=1), "it has an unknown 'momentum'"),
        (lambda state: state["counters"].pop("iter"), "its 'counters' has no 'iter'"),
        (lambda state: state["counters"].update(load=3), "its 'counters' has an unknown 'load'"),
        (lambda state: state["counters"].update(iter="12"), "its 'iter' must be a whole number"),
        (lambda state: state.update(memory=[]), "its 'memory' must be a dict"),
        (lambda state: state["memory"].update(left={"weight": [1.0]}), "must be a dense tensor"),
        (lambda state: state["memory"].update(left={"weight": torch.ones(1).int()}), "is no dtype of grad"),
        (lambda state: state.update(layouts=[[0, 1]]), r"its layouts\[0\] must be a list"),
        (lambda state: state.update(by_name=None), "its 'by_name' True or False"),
    ],
)
def test_a_state_dict_that_is_none_is_refused_and_nothing_is_loaded(change, text):
    other = ours.PowerSGDState(None)
    other.iter = 12
    damaged = other.state_dict()
    change(damaged)
    state = ours.PowerSGDState(None)
    memory = {"residual": {"weight": torch.ones(2)}}
    state.load_state_dict({**state.state_dict(), "memory": memory})
    with pytest.raises(ValueError, match=text):
        state.load_state_dict(damaged)
    assert state.iter == 0
    assert str(state.state_dict()["memory"]) == str(memory)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)  # by its defaults: weights_only


def steps_of(model, seeds):
    seen = []
    for seed in seeds:
        backward(model, seed)
        seen.append(gradients(model).clone())
    return seen


def job_resume(rank):
    for attaches in (False, True):
        for hook in (ours.powerSGD_hook, ours.batched_powerSGD_hook):
            check_resume(hook, attaches=attaches)


def check_resume(hook, *, attaches):
    def install(state):
        model = small_model()
        if attaches:
            gradwire.attach(model, hook, state=state)
        else:
            model.register_comm_hook(state, hook)
        return model

    state = rank_two(None)
    model = install(state)
    steps_of(model, range(5))
    snapshot, pickled = saved(state.state_dict()), saved(state)
    wanted = steps_of(model, range(5, 9))

    resumed = rank_two(None)
    resumed.load_state_dict(snapshot)
    for restored in (resumed, pickled):
        # A new DistributedDataParallel starts with one bucket, and makes several of it after a step.
        have = steps_of(install(restored), range(5, 9))
        assert all(torch.equal(a, b) for a, b in zip(have, wanted, strict=True))
        assert restored.iter == 9

    wrong = rank_two(None)
    wrong.load_state_dict(snapshot)
    attaches = not attaches
    with pytest.raises(ValueError, match="saved (from|without) gradwire.attach"):
        steps_of(install(wrong), range(5, 6))


def test_a_resume_is_exact_across_a_rebuild_of_buckets():
    run_ranks(job_resume, 2)


def job_seeds(rank):
    steps = [draw(10 * rank + s, (30, 20)) for s in range(4)]
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(runs))
        before = torch.get_rng_state()
        runs.append(train(with_hook(ours, random_seed=seed, warm_start=False), steps)[-1][0])
        assert torch.equal(torch.get_rng_state(), before)
    return torch.equal(runs[0], runs[1]), torch.equal(runs[0], runs[2])


def test_a_seed_repeats_and_the_global_generator_is_left_alone():
    assert run_ranks(job_seeds, 2) == [(True, False)] * 2


def test_a_type_is_told_apart_from_a_hook_that_takes_a_state():
    state = ours.PowerSGDState(process_group=None, matrix_approximation_rank=2)
    with pytest.raises(TypeError, match="a process group or None, not PowerSGDState; .*gradwire.attach"):
        DDPCommHookType.POWER_SGD.value(model=None, state=state)


def job_other_options(rank):
    state = ours.PowerSGDState(None, matrix_approximation_rank=1 + rank, start_powerSGD_iter=2)
    model = small_model()
    gradwire.attach(model, ours.powerSGD_hook, state=state)
    with pytest.raises(gradwire.WireError, match=r"ranks do not agree: recipe is powersgd"):
        backward(model)


def test_ranks_with_different_options_are_told_so_before_anything_is_sent():
    run_ranks(job_other_options, 2, timeout=180)
