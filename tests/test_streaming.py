"""A DiLoCo that streams: fragments that are averaged in turn, while training goes on."""

import math
import os
import re
import signal
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.ranks import rank_process
from gradwire.testing import RanksFailed, run_ranks
from gradwire.training import finite_means, fragments, outer_loop
from gradwire.training.fragments import broadcast
from gradwire.training.local_choices import parse_averaging
from tests.local_runs import assert_same_on_all_ranks, flat, loss_of, make, net, saved_bytes, train

# --- against the paper's loop ---


def streaming_loop(rank, num_steps, period, outer):
    """Algorithm 2 of Douillard et al. 2025, with all-reduces of torch and no overlap.

    With ``keeps_steps``, ranks add the steps of the delay to the average instead of mixing.
    """
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in named.items()}
    momentum = {name: torch.zeros_like(p) for name, p in named.items()}
    fragments = outer.divide({name: p.numel() for name, p in named.items()})
    under_way = {}
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        loss_of(model, rank, step - 1).backward()
        optimizer.step()
        with torch.no_grad():
            for number, own in enumerate(fragments):
                if step % period == number * period // len(fragments):
                    for name in own:
                        moved = (start[name] - named[name]).double()
                        dist.all_reduce(moved)
                        mean = (moved / dist.get_world_size()).float()
                        under_way[name] = step + outer.delay, mean, named[name].clone()
            for name, (end, mean, begun) in list(under_way.items()):
                if end == step:
                    momentum[name].mul_(outer.momentum).add_(mean)
                    start[name] -= outer.lr * (mean + outer.momentum * momentum[name])
                    if outer.keeps_steps:
                        named[name].copy_(start[name] + (named[name] - begun))
                    else:
                        named[name].copy_(outer.alpha * named[name] + (1 - outer.alpha) * start[name])
                    del under_way[name]
    return flat(model)


def check_the_papers_loop(rank, outer, recipe, bound):
    expected = streaming_loop(rank, 15, 6, outer)
    model, optimizer, local = make(period=6, outer=outer, recipe=recipe)
    with local:
        ended = train(model, optimizer, local, rank, range(15))
        num = outer.num_fragments
        begun = [step for step in range(1, 16) if step % 6 in {i * 6 // num for i in range(num)}]
        assert ended == [step + outer.delay for step in begun if step + outer.delay <= 15]
        error = (flat(model) - expected).abs().max() / expected.abs().max()
        assert error <= bound, error
        local.average()
        assert_same_on_all_ranks(model)


@pytest.mark.parametrize(
    ("outer", "recipe", "bound"),
    [
        (gradwire.DiLoCo(fragments=3), "fp32", 2e-6),
        (gradwire.DiLoCo(fragments=2, delay=3, alpha=0.25), "int8", 2.0**-6),
        (gradwire.DiLoCo(fragments=[["4.*"], ["*"]], delay=1, alpha=0.5), "fp32", 2e-6),
        (gradwire.DiLoCo(delay=5), "bf16", 2.0**-6),
        (gradwire.DiLoCo(fragments=3, delay=4, keeps_steps=True), "fp32", 2e-6),
    ],
    ids=["fragments", "fragments and delay", "patterns", "delay", "steps of the delay kept"],
)
def test_streaming_is_the_papers_loop(outer, recipe, bound, two_ranks):
    two_ranks.run(check_the_papers_loop, outer, recipe, bound)


def moved_by_a_constant_gradient(outer):
    """Return how far parameters move in 40 periods if each step goes as far, and in the same direction."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)))
    start = flat(model).clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradwire.LocalSGD(model, optimizer, period=5, recipe="fp32", outer=outer) as local:
        for _ in range(200):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            local.step()
        local.average()
    return float((start - flat(model)).mean())


def check_the_momentum_counts_with_a_delay(rank):
    plain = moved_by_a_constant_gradient(gradwire.DiLoCo())
    streaming = moved_by_a_constant_gradient(gradwire.DiLoCo(fragments=2, delay=2, keeps_steps=True))
    assert 0.95 * plain < streaming < 1.05 * plain
    mixed = moved_by_a_constant_gradient(gradwire.DiLoCo(fragments=2, delay=2, alpha=0.5))
    assert mixed < 0.4 * plain, "a rank that keeps half of itself holds back the momentum"


def test_the_outer_momentum_counts_as_without_a_delay_if_steps_are_kept(two_ranks):
    two_ranks.run(check_the_momentum_counts_with_a_delay)


# --- every ending ---

ENDLESS = {
    "period": 6,
    "warmup_steps": 1,
    "recipe": "int4",  # has residuals to go on with
    "outer": gradwire.DiLoCo(fragments=2, delay=2),
}


def check_resumes_in_a_delay(rank, keeps_steps):
    options = {**ENDLESS, "outer": gradwire.DiLoCo(fragments=2, delay=2, keeps_steps=keeps_steps)}
    for saved_after in (1, 5, 6):  # in the warm-up, in an averaging, after one
        model, optimizer, local = make(**options)
        with local:
            train(model, optimizer, local, rank, range(saved_after))
            saved = saved_bytes(model.module.state_dict(), optimizer.state_dict(), local.state_dict())
            assert bool(saved[2]["mean"]) == (saved_after == 5)
            assert bool(saved[2]["begun"]) == (saved_after == 5 and keeps_steps)
            train(model, optimizer, local, rank, range(saved_after, 16))
        resumed, resumed_optimizer, local = make(**options)
        with local:
            train(resumed, resumed_optimizer, local, rank, range(5))  # has a delay of its own to forget
            resumed.module.load_state_dict(saved[0])
            resumed_optimizer.load_state_dict(saved[1])
            local.load_state_dict(saved[2])
            train(resumed, resumed_optimizer, local, rank, range(saved_after, 16))
            assert torch.equal(flat(model), flat(resumed)), saved_after
            assert local.state_dict()["turn"]["num_averages"] == 4


@pytest.mark.parametrize("keeps_steps", [False, True])
def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_delay(two_ranks, keeps_steps):
    two_ranks.run(check_resumes_in_a_delay, keeps_steps)


def check_a_state_of_other_fragments(rank):
    model, optimizer, local = make(**ENDLESS)
    with local:
        train(model, optimizer, local, rank, range(5))
        during = local.state_dict()
        local.average()
        between = local.state_dict()
    others = {**ENDLESS, "outer": gradwire.DiLoCo(fragments=3)}
    model, optimizer, local = make(**others)
    with local:
        with pytest.raises(ValueError, match="saved during an averaging, with 2 fragments; there are 3 now"):
            local.load_state_dict(during)
        local.load_state_dict(between)
        for name, tensor in local.state_dict()["start"].items():
            assert torch.equal(tensor, between["start"][name])


def test_fragments_may_change_between_averagings_only(two_ranks):
    two_ranks.run(check_a_state_of_other_fragments)


def job_a_rank_dies(rank):
    """Rank 2 dies while an averaging is under way: the others raise, and keep what they had."""
    model, optimizer, local = make(**{**ENDLESS, "warmup_steps": 0})
    train(model, optimizer, local, rank, range(2))
    before = local.state_dict()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)  # before its third step, in which an averaging begins
    with pytest.raises(gradwire.WireError, match="Furthest behind is rank 2"):
        train(model, optimizer, local, rank, range(2, 9))
    assert 3 <= local.num_steps <= 5, "training goes on until the failure is known, or the delay is over"
    after = local.state_dict()
    assert not after["mean"]
    assert not after["averaging"]["entries"], "steps to average again are in no residual"
    assert all(torch.equal(tensor, before["start"][name]) for name, tensor in after["start"].items())
    moved = flat(model)
    with pytest.raises(gradwire.WireError, match="Furthest behind is rank 2"):
        local.step()
    assert torch.equal(moved, flat(model)), "a failed averaging leaves parameters as they were"
    local.detach()

    # The rest go on together, each with its own work since the last average.
    survivors = dist.new_group([0, 1], use_local_synchronization=True)
    model = DistributedDataParallel(net(), process_group=survivors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.LocalSGD(model, optimizer, **{**ENDLESS, "warmup_steps": 0}) as local:
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(moved, model.parameters())
        assert not local.resume(after)
        local.average()
        mean = moved.double()
        dist.all_reduce(mean, group=survivors)
        expected = mean / 2
        assert (flat(model) - expected).abs().max() <= 0.3 * (moved - expected).abs().max()


def test_a_rank_that_dies_in_a_delay_is_an_error_on_all_others_which_can_go_on(monkeypatch):
    monkeypatch.setattr(rank_process, "_GRACE_S", 120.0)  # those that are left have work to do
    with pytest.raises(RanksFailed) as caught:
        run_ranks(job_a_rank_dies, 3, 240)
    assert caught.value.errors.keys() == {2}, caught.value


# --- ranks of different speeds, and steps that do not count ---


def check_periods_in_seconds(rank):
    """Rank 1 takes a step where rank 0 takes three; they average as often, in the same order."""
    clock = [0.0]
    outer = gradwire.DiLoCo(fragments=2, delay=1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.MonkeyPatch.context() as patch,
        gradwire.LocalSGD(
            model, optimizer, period=timedelta(seconds=12), recipe="int8", outer=outer, weigh=True
        ) as local,
    ):
        patch.setattr(local._loop.turns, "_clock", lambda: clock[0])
        local._loop.turns.restart(0)
        while local.num_averages < 5:
            clock[0] += 3.0 if rank else 1.0
            optimizer.zero_grad()
            loss_of(model, rank, local.num_steps).backward()
            optimizer.step()
            local.step(work=2.0)
        assert local.num_steps == (11 if rank else 31)
        work = local.state_dict()["turn"]["work"]
        local.average()
        assert_same_on_all_ranks(model)
        assert local.num_averages == 7
        saved = local.state_dict()
        everyone = [None, None]
        dist.all_gather_object(everyone, work)
        assert everyone[0][0] > everyone[1][0] > 0
        local.load_state_dict(saved)
        with pytest.raises(ValueError, match="the saved number of averagings is"):
            local.load_state_dict({**saved, "turn": {**saved["turn"], "num_begun": 8 + rank}})


def test_a_period_in_seconds_lets_ranks_take_as_many_steps_as_they_can(two_ranks):
    two_ranks.run(check_periods_in_seconds)


def check_an_end_by_steps(rank, num_fragments):
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = DistributedDataParallel(net(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = gradwire.DiLoCo(fragments=num_fragments, delay=1)
    with gradwire.LocalSGD(model, optimizer, period=timedelta(seconds=0.1), outer=outer) as local:
        if rank == 0:
            train(model, optimizer, local, rank, range(3))
        else:
            while local.num_averages < 4:  # which rank 0 must take part in
                train(model, optimizer, local, rank, range(local.num_steps, local.num_steps + 1))
        local.average()
        assert_same_on_all_ranks(model)
        assert local.num_averages >= 4 + num_fragments


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_a_rank_without_more_data_takes_part_by_the_clock_until_the_others_have_come(
    num_fragments, two_ranks
):
    two_ranks.run(check_an_end_by_steps, num_fragments)


def check_weights(rank):
    """Rank 0 has done three times as much; a rank whose steps were all skipped hardly counts."""
    for work, shares in (((3.0, 1.0), (0.75, 0.25)), ((2.0, 0.0), (1.0, 0.0)), ((0.0, 0.0), (0.5, 0.5))):
        model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
        with torch.no_grad():
            model.module.weight.fill_(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with gradwire.LocalSGD(model, optimizer, period=2, weigh=True) as local:
            for _ in range(2):
                with torch.no_grad():
                    model.module.weight += 1.0 + rank
                ended = local.step(work[rank] / 2)
            assert ended
            expected = torch.full((2, 3), 2 * shares[0] + 4 * shares[1])
            torch.testing.assert_close(model.module.weight.detach(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="cannot take weights: its feedback"):
        gradwire.LocalSGD(model, optimizer, period=2, weigh=True, recipe="int4")


def test_ranks_are_weighed_by_the_work_that_they_have_done(two_ranks):
    two_ranks.run(check_weights)


def check_odd_work(rank):
    """Refused work is not counted: ranks go on, and no weight of theirs is NaN or negative."""
    for weigh in (True, False):
        model, optimizer, local = make(period=2, weigh=weigh)
        with local:
            for work in (-1.0, math.nan, math.inf, torch.tensor(-2.0)):
                with pytest.raises(ValueError, match="work must be finite and not negative, not"):
                    local.step(work)
            with pytest.raises(TypeError):
                local.step(None)
            assert local.num_steps == 0
            assert train(model, optimizer, local, rank, range(3)) == [2]
            assert local.step(torch.tensor(2.0))
            assert local.num_averages == 2
            assert flat(model).isfinite().all()
            local.load_state_dict(local.state_dict())


def test_work_that_can_be_no_weight_is_refused_before_it_counts(two_ranks):
    two_ranks.run(check_odd_work)


def check_skipped_steps(rank):
    """A scaler that skips steps on one rank, in the middle of a delay, keeps ranks in step."""
    model, optimizer, local = make(period=4, outer=gradwire.DiLoCo(fragments=2, delay=1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with local:
        for step in range(9):
            optimizer.zero_grad()
            factor = float("inf") if rank == 1 and step in (1, 2, 5) else 1.0
            scaler.scale(loss_of(model, rank, step) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            assert local.step() == (step + 1 in (3, 5, 7, 9))
        local.average()
        assert_same_on_all_ranks(model)
        assert flat(model).isfinite().all()


def test_a_scaler_may_skip_steps_while_an_averaging_is_under_way(two_ranks):
    two_ranks.run(check_skipped_steps)


@pytest.mark.parametrize(
    ("outer", "weigh", "default"),
    [
        (gradwire.DiLoCo(), False, "int4"),
        (gradwire.DiLoCo(fragments=2, delay=1), False, "int4"),
        (gradwire.DiLoCo(), True, "int4:feedback=false"),
        (gradwire.SlowMo(), False, "fp32"),
        (None, True, "fp32"),
    ],
)
def test_the_default_recipe_is_int4_with_diloco_and_fp32_without(outer, weigh, default):
    assert parse_averaging(None, outer, weigh).name == default
    assert parse_averaging("bf16", outer, weigh).name == "bf16"


def check_not_finite(rank):
    model, optimizer, local = make(period=4, outer=gradwire.DiLoCo(fragments=2, delay=1))
    with local:
        train(model, optimizer, local, rank, range(3))
        before = local.state_dict()
        if rank == 1:
            with torch.no_grad():
                model.module[2].bias[3] = math.nan
        with pytest.raises(FloatingPointError if rank else gradwire.WireError) as caught:
            train(model, optimizer, local, rank, range(3, 9))
        assert re.search("rank 1, step 4, .*parameter '.*' is not finite", str(caught.value))
        assert isinstance(caught.value, gradwire.WireError)
        after = local.state_dict()
        for kind in ("start", "momentum"):
            assert all(torch.equal(values, after[kind][name]) for name, values in before[kind].items())


def test_a_rank_that_diverges_is_an_error_on_all_and_the_last_average_stays(two_ranks):
    two_ranks.run(check_not_finite)


def check_not_finite_later(rank, outer, recipe):
    """Look at means as on a GPU, where the host does not wait to look at what it sends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer_loop, "looks_first", lambda values: False)
        patch.setattr(finite_means, "looks_first", lambda values: False)
        model, optimizer, local = make(period=4, outer=outer, recipe=recipe)
        with local:
            train(model, optimizer, local, rank, range(3))
            before, parameters = local.state_dict(), flat(model).clone()
            if rank == 1:
                with torch.no_grad():
                    model.module[2].bias[3] = math.nan
            num_before = local.num_averages
            for _ in range(4):  # no more steps of the optimizer: parameters stay, unless averages move them
                local.step()
                if local.num_averages > num_before:
                    break
            after = local.state_dict()
            for kind in ("start", "momentum") if outer is not None else ("start",):
                assert all(torch.equal(values, after[kind][name]) for name, values in before[kind].items())
            assert not after["averaging"]["entries"], "steps to average again are in no residual"
            assert not after["turn"]["under_way"]
            moved = flat(model) != parameters
            assert int(moved.sum()) == rank, "only the value that is NaN has changed"
            with pytest.raises(gradwire.WireError, match="the last average is not finite") as caught:
                for _ in range(9):
                    local.step()
            texts = "parameter '2.bias' on this rank is|parameters of another rank are"
            assert re.search(f"so it has changed nothing: ({texts}) not finite", str(caught.value))


@pytest.mark.parametrize(
    ("outer", "recipe"),
    [(gradwire.DiLoCo(), "int4"), (gradwire.DiLoCo(delay=1), "int2"), (None, "fp32")],
    ids=["plain", "with a delay", "no outer optimizer"],
)
def test_an_average_that_is_not_finite_moves_nothing_where_ranks_look_at_it_later(two_ranks, outer, recipe):
    two_ranks.run(check_not_finite_later, outer, recipe)


def check_finite_later(rank):
    ends = []
    for later in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if later:
                patch.setattr(finite_means, "looks_first", lambda values: False)
            model, optimizer, local = make(period=4, outer=gradwire.DiLoCo(fragments=2, delay=1))
            with local:
                train(model, optimizer, local, rank, range(11))
                local.average()
                ends.append(flat(model).clone())
    assert torch.equal(*ends)


def test_averages_that_are_finite_move_parameters_alike_wherever_ranks_look(two_ranks):
    two_ranks.run(check_finite_later)


def check_starts(rank):
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fragments, "broadcast", lambda tensor, *_: sent.append(tensor) or broadcast(tensor, *_))
        *_, local = make(period=4, outer=gradwire.DiLoCo(fragments=2))
        local.detach()
        assert not sent, "DDP has sent them"
        model = net()
        with torch.no_grad():
            model[2].bias.add_(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = gradwire.DiLoCo(fragments=["2.*", "*"])
        gradwire.LocalSGD(model, optimizer, period=4, outer=outer, sites=dist.group.WORLD).detach()
    assert len(sent) == 1, "the other bucket is the same"
    assert_same_on_all_ranks(model)
    assert torch.equal(flat(model), flat(net()))


def test_parameters_are_sent_at_the_start_only_if_they_differ(two_ranks):
    two_ranks.run(check_starts)


def check_lone_averages(rank):
    for outer in (gradwire.DiLoCo(), gradwire.DiLoCo(fragments=3, delay=1)):
        model, optimizer, local = make(period=4, outer=outer)
        with local, pytest.raises(gradwire.WireError, match=r"the call is .*average\(\) on rank\(s\) 0"):
            train(model, optimizer, local, rank, range(6))
            if rank == 0:
                local.average()  # as before an evaluation that rank 0 does alone
            train(model, optimizer, local, rank, range(6, 10))


def test_a_rank_that_averages_alone_is_an_error_on_all(two_ranks):
    two_ranks.run(check_lone_averages)


def check_an_uneven_end(rank):
    model, optimizer, local = make(period=8, recipe="int2")
    with local:
        start = flat(model)
        train(model, optimizer, local, rank, range(5 + rank))
        mean = flat(model)
        dist.all_reduce(mean)
        mean /= 2
        local.average()
        assert_same_on_all_ranks(model)
        assert (flat(model) - mean).norm() < 0.6 * (mean - start).norm()


def test_ranks_that_end_after_different_steps_can_average(two_ranks):
    two_ranks.run(check_an_uneven_end)


def check_the_way_to_train_by_the_clock(rank):
    """The argument that the error names is taken, and torch does not warn of it."""
    options = {}
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = DistributedDataParallel(nn.BatchNorm1d(3), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            gradwire.LocalSGD(model, optimizer, period=timedelta(seconds=1))
        except ValueError as error:
            options[re.search(r"make it with (\w+)=False", str(error))[1]] = False
    assert len(options) == 1
    assert not model.broadcast_buffers


def test_buffers_stay_with_ranks_that_average_by_the_clock_without_a_warning_of_torch(two_ranks):
    two_ranks.run(check_the_way_to_train_by_the_clock)


def check_refusals(rank):
    model = DistributedDataParallel(nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = timedelta(seconds=1)
    for options, text in (
        ({"period": timedelta(0)}, "period must be more than 0 seconds"),
        ({"period": second}, "DDP broadcasts this model's buffers"),
        ({"period": 4, "outer": gradwire.DiLoCo(delay=4)}, "delay must be less than the period of 4 steps"),
        ({"period": 1, "outer": gradwire.DiLoCo(fragments=["weight", "bias"])}, "too short for 2 fragments"),
        ({"period": 9, "outer": gradwire.DiLoCo(fragments=3)}, "2 layers .weight, bias., too few"),
        ({"period": 9, "outer": gradwire.DiLoCo(delay=1 + rank)}, "outer is DiLoCo"),
    ):
        with pytest.raises(ValueError, match=text):
            gradwire.LocalSGD(model, optimizer, **options)
    with pytest.raises(TypeError, match="a number of steps or a datetime.timedelta"):
        gradwire.LocalSGD(model, optimizer, period=1.5)
    with pytest.raises(TypeError, match="timeout must be a datetime.timedelta, not 5"):
        gradwire.LocalSGD(model, optimizer, period=1, timeout=5)
    for warmup_steps in (1.5, 0.1 * 20, "3", True):
        with pytest.raises(TypeError, match="warmup_steps is a number of steps, not"):
            gradwire.LocalSGD(model, optimizer, period=1, warmup_steps=warmup_steps)
    for outer, what in {
        "diloco": "'diloco'",
        gradwire.DiLoCo: r"the class DiLoCo: call it, as in DiLoCo\(...\)",
        optimizer: r"torch.optim.SGD; for SGD with Nesterov momentum, give gradwire.DiLoCo\(\)",
    }.items():
        with pytest.raises(TypeError, match=rf"such as gradwire.DiLoCo\(\), or None, not {what}$"):
            gradwire.LocalSGD(model, optimizer, period=1, outer=outer)
    model = DistributedDataParallel(nn.Linear(3, 2), find_unused_parameters=True)
    with pytest.raises(ValueError, match="make it with find_unused_parameters=False"):
        gradwire.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), period=second)
    for wrong in ({"fragments": 0}, {"delay": -1}, {"delay": True}, {"alpha": 1.0}, {"order": "random"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            gradwire.DiLoCo(**wrong)
    with pytest.raises(ValueError, match="keeps_steps takes the whole average"):
        gradwire.DiLoCo(delay=2, alpha=0.5, keeps_steps=True)
    with pytest.raises(TypeError, match="keeps_steps must be True or False, not 'false'"):
        gradwire.DiLoCo(keeps_steps="false")
    with pytest.raises(TypeError, match="wrap Sequential in DistributedDataParallel, .* or give sites="):
        gradwire.LocalSGD(net(), optimizer, period=2)
    for wrong in ("*", [], [["*"], []], True, 2.0):
        with pytest.raises(TypeError, match="fragment"):
            gradwire.DiLoCo(fragments=wrong)


def test_what_cannot_stream_is_refused(two_ranks):
    two_ranks.run(check_refusals)
