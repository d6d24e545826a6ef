"""Recipe `auto` on real and virtual ranks: all choose alike, nothing is lost, resumed runs go on."""

import json
import pickle

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.averaging import NativeMean
from gradwire.ddp import AttachedModel, Attachments, ddp_attachment_of
from gradwire.recipes import ENCODINGS, with_node_size
from gradwire.scripts import Observations, summarize
from gradwire.testing import VirtualRanks
from gradwire.tuning.policy import NUM_SETTLING, NUM_TIMED
from gradwire.tuning.times import Times
from tests.auto_runs import FIRST, HIDDEN, SLOW, Net, flat, make, require_same_everywhere, train
from tests.resumed_runs import through_a_file

# --- text ---


@pytest.mark.parametrize(
    "spec",
    [
        "auto",
        "auto:budget=0.1,every=50",
        "auto:bytes=2000000.0",
        "auto:floor=int4,ceiling=int8,feedback=true",
    ],
)
def test_it_is_a_recipe_like_any_other(spec):
    found = gradwire.recipe(spec)
    assert str(found) == spec
    assert found == pickle.loads(pickle.dumps(found)) == gradwire.recipe(str(found))
    assert hash(found) == hash(gradwire.recipe(spec))
    in_nodes = with_node_size(found, 4)
    assert in_nodes == gradwire.recipe(str(in_nodes))
    assert in_nodes.local_size == 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("auto:budget=0", "a relative error between 0 and 1"),
        ("auto:budget=nan", "a relative error between 0 and 1"),
        ("auto:bytes=0", "bytes must be above 0"),
        ("auto:bytes=1e6,budget=0.2", "give one of them"),
        ("auto:every=0", "every must be at least 1, not 0"),
        ("auto:floor=int8,ceiling=int4", "swap them"),
        ("auto:floor=sign", "must be fp32 or bf16 or int8 or int4 or int3 or int2"),
        ("route(*=auto)", "a route cannot contain it"),
        ("schedule(0=bf16; 9=auto)", "a schedule cannot contain it"),
    ],
)
def test_options_that_cannot_be_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        gradwire.recipe(spec)


# --- choices ---


def check_choice(rank, times):
    model, optimizer, wire = make("auto:budget=0.2", times)
    with wire:
        plain = DistributedDataParallel(Net())
        train(model, optimizer, range(FIRST + 1))
        (decision,) = wire.decisions()
        assert decision.step == FIRST
        require_same_everywhere(decision)
        assert set(decision.encodings) == {name for name, _ in model.module.named_parameters()}
        if times == HIDDEN:
            assert set(decision.encodings.values()) == {"fp32"}, "on trial"
            return
        assert len(set(decision.encodings.values())) > 1, "by parameter"
        large, small = (decision.encodings[f"{name}.weight"] for name in ("head", "layers.2"))
        assert ENCODINGS.index(large) < ENCODINGS.index(small), "large gradients have more bits"
        for step in (50, 51):
            plain.module.load_state_dict(model.module.state_dict())
            train(plain, torch.optim.SGD(plain.parameters(), lr=0.0), [step])
            train(model, torch.optim.SGD(model.parameters(), lr=0.0), [step])
            exact, found = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (plain, model))
            error = ((found - exact).norm() / exact.norm()).item()
            assert 0.02 < error < 0.2, "the budget is kept"
            assert error < 1.1 * decision.error
            require_same_everywhere(pickle.dumps(found.tolist()))
        sent = sum(bucket.bytes_sent for bucket in wire.stats().steps[-1].buckets)
        assert wire.plan().bytes_sent == sent <= decision.bytes_per_step
        assert decision.reason in str(wire)
        attachments = Attachments(wire.recipe, [AttachedModel(wire, rank, 3)])
        assert decision.reason in summarize(attachments, Observations()), "what `gradwire run` ends with"


@pytest.mark.parametrize("times", [SLOW, HIDDEN], ids=["slow", "hidden"])
def test_all_ranks_choose_alike_and_keep_the_budget(times, three_ranks):
    three_ranks.run(check_choice, times)


def check_ceiling(rank, path):
    model, optimizer, wire = make("bf16", HIDDEN)
    wire.detach()
    telemetry = gradwire.Telemetry(jsonl=path, errors=False)
    with gradwire.attach(model, "auto:bytes=40000", telemetry=telemetry) as wire:
        train(model, optimizer, range(FIRST + 3))
        assert all(d.bytes_per_step <= 40_000 for d in wire.decisions())
        assert sum(b.bytes_sent for b in wire.stats().steps[-1].buckets) <= 40_000
    if rank == 0:
        (event,) = [
            e for line in path.read_text().splitlines() if (e := json.loads(line))["event"] == "decision"
        ]
        assert (event["step"], event["encodings"]) == (FIRST, dict(wire.decisions()[0].encodings))


def test_a_ceiling_of_bytes_is_kept_and_decisions_are_events(two_ranks, tmp_path):
    two_ranks.run(check_ceiling, tmp_path / "wire.jsonl")


def check_different_times(rank):
    # Each rank measures other times; the decision is that of all.
    model, optimizer, wire = make("auto", [SLOW, HIDDEN][rank])
    with wire:
        train(model, optimizer, range(40))
        require_same_everywhere(wire.decisions())
        first = wire.decisions()[0]
        assert first.exposed_ms == 1.0, "one rank only waits for the other"
        assert set(first.encodings.values()) == {"fp32"}


def test_ranks_that_measure_different_times_decide_alike(two_ranks):
    two_ranks.run(check_different_times)


def check_spoiled(rank):
    model, optimizer, wire = make("auto")
    with wire:
        train(model, optimizer, range(FIRST + 3), spoil=(FIRST - 1, FIRST, FIRST + 1))
        assert wire.decisions() == (), "it looks after a step, then after two"
        train(model, optimizer, range(FIRST + 3, FIRST + 4))
        (decision,) = wire.decisions()
        assert decision.step == FIRST + 3
        assert 0 < decision.error < 0.3


def test_steps_that_are_not_finite_are_ignored(two_ranks):
    two_ranks.run(check_spoiled)


def check_unfrozen(rank):
    spec = "auto:every=1000,ceiling=bf16,floor=bf16"  # it tries nothing, and so may look at any time
    model, optimizer, wire = make(spec, find_unused_parameters=True)
    with wire:
        for layer in model.module.layers[:2]:
            layer.register_forward_hook(lambda module, inputs, result: result.detach())
        train(model, optimizer, range(70))
        state = json.loads(wire.state_dict()["tuning"])
        assert False in state["used"]
        for layer in model.module.layers[:2]:
            layer._forward_hooks.clear()
        train(model, optimizer, range(70, 105))
        state = json.loads(wire.state_dict()["tuning"])
        assert False not in state["used"], "it has looked again"
        require_same_everywhere(wire.decisions())


def test_parameters_that_are_unfrozen_are_noticed(two_ranks):
    two_ranks.run(check_unfrozen)


def check_exact(rank):
    def times():
        encodings = set(ddp_attachment_of(wire).tuned.tuner.encodings.values()) or {"bf16"}
        return Times({"fp32": 0.5, "bf16": 1.0}.get(max(encodings), 2.0), 0.3, 0.3)

    started = []
    model, optimizer, wire = make("auto:feedback=true,floor=int4", times)
    engine = ddp_attachment_of(wire).engine
    start = NativeMean.start
    NativeMean.start = lambda *args: started.append(args) or start(*args)
    with wire:
        train(model, optimizer, range(FIRST + 2))
        assert "int4" in wire.decisions()[0].encodings.values()
        assert engine.state.memory.named()["residual"]
        train(model, optimizer, range(FIRST + 2, 60))
        assert set(wire.decisions()[-1].encodings.values()) == {"fp32"}
        assert not engine.state.memory.named().get("residual"), "what was held back is sent"
        plain = DistributedDataParallel(Net(), bucket_cap_mb=0.15)
        plain.module.load_state_dict(model.module.state_dict())
        started.clear()
        for each in (plain, model):
            train(each, torch.optim.SGD(each.parameters(), lr=0.0), [60, 61])
        assert len(started) == 2 * len(wire.layout()), "DDP's own all-reduce takes every bucket"
        assert all(torch.equal(*grads) for grads in zip(*map(gradients, (plain, model)), strict=True))
        sent = sum(bucket.bytes_sent for bucket in wire.stats().steps[-1].buckets)
        assert sent == pytest.approx(wire.plan().bytes_sent, rel=1e-3)
        wire.swap("fp32")
        train(model, optimizer, [62])
        assert len(started) == 2 * len(wire.layout()), "only for auto"
    NativeMean.start = start


def gradients(model):
    return [p.grad for p in model.parameters()]


def test_exact_gradients_are_left_to_ddp_if_they_are_fastest(two_ranks):
    two_ranks.run(check_exact)


def check_join(rank):
    results = []
    for spec in ("noop", "auto:floor=fp32"):
        model, optimizer, wire = make(spec)
        if spec == "noop":
            wire.detach()  # plain DDP
        with model.join():
            train(model, optimizer, range(FIRST + 3 + 4 * rank))
        results.append(flat(model))
        wire.detach()
    assert torch.equal(*results)


def test_exact_gradients_work_where_ranks_have_uneven_inputs(two_ranks):
    two_ranks.run(check_join)


# --- changes by the user, checkpoints ---


def check_swaps(rank):
    model, optimizer, wire = make("int4")
    with wire:
        train(model, optimizer, range(3))
        assert wire.decisions() == ()
        wire.swap("auto")
        train(model, optimizer, range(3, 4 + FIRST))
        (decision,) = wire.decisions()
        assert decision.step == 3 + FIRST
        (memory,) = wire.state_dict()["memory"].values()
        assert not memory, "what int4 held back is sent"
        wire.swap("int8")
        assert wire.decisions() == ()
        train(model, optimizer, range(20, 23))


def test_it_takes_over_from_other_recipes_and_they_from_it(two_ranks):
    two_ranks.run(check_swaps)


def check_resumed(rank, spec):
    model, optimizer, wire = make(spec)
    train(model, optimizer, range(24))
    saved = through_a_file([model.module.state_dict(), optimizer.state_dict(), wire.state_dict()])
    decisions = wire.decisions()
    train(model, optimizer, range(24, 62))
    assert len(wire.decisions()) >= len(decisions) > 0
    wire.detach()
    again, optimizer, resumed = make(spec)
    again.module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    assert resumed.decisions() == decisions
    train(again, optimizer, range(24, 62))
    assert torch.equal(flat(model), flat(again)), "bit for bit"
    assert resumed.decisions() == wire.decisions()
    resumed.detach()


@pytest.mark.parametrize("spec", ["auto:budget=0.2,every=40", "auto:feedback=true"])
def test_a_resumed_run_is_the_one_that_was_not_stopped(spec, two_ranks):
    two_ranks.run(check_resumed, spec)


def check_other_states(rank):
    model, optimizer, wire = make("auto")
    train(model, optimizer, range(FIRST + 1))
    state = wire.state_dict()
    wire.detach()
    with gradwire.attach(model, "int8") as other:
        other.load_state_dict(state)
        without = other.state_dict()
        assert "tuning" not in without
    with gradwire.attach(model, "auto") as wire:
        wire.load_state_dict(without)
        assert wire.decisions() == ()
        with pytest.raises(ValueError, match="its tuning cannot be read"):
            wire.load_state_dict({**state, "tuning": "{}"})
        with pytest.raises(ValueError, match="its tuning must be text"):
            wire.load_state_dict({**state, "tuning": 3})
        wire.load_state_dict(state)
        assert len(wire.decisions()) == 1


def test_states_of_other_recipes_are_taken_and_damaged_ones_refused(two_ranks):
    two_ranks.run(check_other_states)


# --- virtual ranks ---


def train_virtually(model, ranks, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        for rank in range(ranks.world_size):
            torch.manual_seed(1000 * step + rank)
            with ranks.backward_of(rank):
                model(torch.randn(6, 160)).square().mean().backward()
        ranks.average()
        optimizer.step()


def test_virtual_ranks_choose_too_and_resume_on_another_number():
    torch.manual_seed(0)
    model = Net()
    ranks = VirtualRanks(model, "auto:budget=0.2", 4)
    train_virtually(model, ranks, range(FIRST + 3))
    (decision,) = ranks.decisions()
    assert len(set(decision.encodings.values())) > 1
    state = through_a_file(ranks.state_dict())
    fewer = VirtualRanks(model, "auto:budget=0.2", 2)
    fewer.load_state_dict(state)
    assert fewer.decisions() == ranks.decisions()
    assert fewer.recipe.exchange == ranks.recipe.exchange
    looked = json.loads(fewer.state_dict()["tuning"])["next_look"]
    assert looked == FIRST + 3 + NUM_SETTLING + NUM_TIMED, "errors differ with the number of ranks"
    train_virtually(model, fewer, range(FIRST + 3, looked + 1))
    assert json.loads(fewer.state_dict()["tuning"])["next_look"] > looked


def test_a_plan_cannot_know_what_it_will_choose():
    from gradwire.planner import Cluster, step_traffic

    with pytest.raises(ValueError, match="does not work with a plan"):
        step_traffic("auto", [(1000, 1000)], Cluster(num_nodes=2))
