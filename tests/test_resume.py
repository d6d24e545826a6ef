"""Resumed runs are, bit for bit, those that were not stopped."""

import copy
import io
import pickle
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.averaging import Grid, checkpoint
from gradwire.averaging.regroup import Timeline
from gradwire.testing import run_ranks
from tests.rows import ROWS

SPECS = [row.spec for row in ROWS if 2 in row.world_sizes] + [
    "int4:residual=bf16,rounding=stochastic",
    "schedule(0=int4; 2=fp32; 4=sign:feedback=true)",
    "route(*.bias=schedule(0=fp32; 3=int4); *=int4:rounding=stochastic)",
]
NUM_STEPS = 7


class Net(nn.Module):
    """A model of layers of several sizes, one of them with another memory order."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList([nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3)])
        self.sometimes = nn.Linear(40, 40)

    def forward(self, x, use_sometimes):
        x = self.conv(x).mean((2, 3))
        x = self.layers[1](self.layers[0](x).tanh()).tanh()
        return self.layers[2](self.sometimes(x) if use_sometimes else x)


def make(spec, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.002, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), gradwire.attach(model, spec)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        use_sometimes = not model.find_unused_parameters or step % 2 == 0
        model(torch.randn(5, 2, 6, 6), use_sometimes).square().mean().backward()
        optimizer.step()


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def snapshot(model, optimizer, wire):
    return through_a_file([model.module.state_dict(), optimizer.state_dict(), wire.state_dict()])


def resume(spec, saved, **options):
    model, optimizer, wire = make(spec, **options)
    weights, optimizer_state, state = saved
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(optimizer_state)
    wire.load_state_dict(state)
    return model, optimizer, wire


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run_whole(spec, **options):
    """Return a run that is not stopped, and what was saved before each of its steps."""
    model, optimizer, wire = make(spec, **options)
    saved = []
    with wire:
        for step in range(NUM_STEPS):
            saved.append(snapshot(model, optimizer, wire))
            train(model, optimizer, [step])
    return flat(model), saved


GRAPHS = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


def job_resume(rank, specs, seed):
    for number, spec in enumerate(specs):
        check_resume(rank, spec, f"{seed} {number}")


def check_resume(rank, spec, seed):
    choice = random.Random(seed)
    options = GRAPHS[choice.randrange(len(GRAPHS))]
    whole, saved = run_whole(spec, **options)
    for stopped_at in choice.sample(range(NUM_STEPS), 4):
        model, optimizer, wire = resume(spec, saved[stopped_at], **options)
        # Stopped a second time, and resumed; not before it has seen what DDP rebuilds, if nobody had.
        num_unseen = 2 if stopped_at <= 2 else 0
        again = choice.choice([stopped_at, *range(stopped_at + num_unseen + 1, NUM_STEPS + 1)])
        with wire:
            train(model, optimizer, range(stopped_at, again))
            second = snapshot(model, optimizer, wire)
        assert wire.stats().num_steps == again - stopped_at
        model, optimizer, wire = resume(spec, second, **options)
        with wire:
            train(model, optimizer, range(again, NUM_STEPS))
        assert torch.equal(flat(model), whole), (spec, options, stopped_at, again)


@pytest.mark.parametrize("spec", SPECS)
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_stopped(spec, two_ranks):
    two_ranks.run(check_resume, spec, f"2 {spec}")


def random_spec(choice, *, feedback=None):
    """Draw a recipe with any options, alone, in a route or in a schedule; with feedback or not, if told."""
    reduction = choice.choice(["mean", "mean", "sum"])

    def plain():
        low_rank = {"rank": [1, 2, 3], "start": [0, 1, 4], "feedback": [True, False], "seed": [0, 5]}
        low_rank["factors"] = ["fp32", "int8", "int4"]
        blocks = {"block": [64, 128, 512], "feedback": [True, False], "residual": ["fp32", "bf16"]}
        noise = {"rounding": ["nearest", "stochastic"], "seed": [0, 7]}
        table = {
            **{name: {**blocks, **noise} for name in ("int8", "fp8", "int4")},
            "sign": blocks,
            "powersgd": {**low_rank, "warm_start": [True, False], "whole": [True, False]},
            "acp": low_rank,
            **{name: {} for name in ("fp32", "fp16", "bf16")},
        }
        name = choice.choice([name for name in table if not feedback or table[name]])
        options = {option: choice.choice(values) for option, values in table[name].items()}
        if feedback and "feedback" in options:
            options["feedback"] = True
        options = {**options, "reduction": reduction}
        return f"{name}:{','.join(f'{option}={value}' for option, value in options.items())}"

    def scheduled():
        return f"schedule(0={plain()}; {choice.randint(1, 3)}={plain()}; {choice.randint(4, 6)}={plain()})"

    return choice.choice(
        [
            plain(),
            plain(),
            f"route(ndim<2={plain()}; numel>1000={plain()}; *={scheduled()})",
            scheduled(),
        ]
    )


def check_any_recipe_resumes(seed, world_size, num_specs):
    choice = random.Random(f"{seed} {world_size}")
    specs = [random_spec(choice) for _ in range(num_specs)]
    run_ranks(job_resume, world_size, timeout=240, args=(specs, seed))


@pytest.mark.parametrize("world_size", [1, 3])
def test_so_is_one_with_any_recipe_stopped_at_any_step(world_size):
    check_any_recipe_resumes(0, world_size, num_specs=3)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(1, 6))
def test_so_is_one_with_any_of_many_recipes(seed, world_size):
    check_any_recipe_resumes(seed, world_size, num_specs=8)


def test_a_layout_changes_at_the_same_step_whenever_a_run_was_resumed():
    first, rebuilt = (("float32", ("a", "b")),), (("float32", ("b",)), ("float32", ("a",)))
    for num_transient in (1, 2, 3):

        def used(timeline, steps, run_start, num_transient=num_transient):
            for step in steps:
                arriving = first if step < run_start + num_transient else rebuilt
                yield timeline.at(step) or arriving
                timeline.arrived(step, arriving)

        whole = list(used(Timeline(num_transient), range(12), 0))
        for stop in range(12):
            timeline = Timeline(num_transient)
            assert list(used(timeline, range(stop), 0)) == whole[:stop]
            resumed = Timeline(num_transient)
            resumed.load(stop, timeline.save(stop))
            assert list(used(resumed, range(stop, 12), stop)) == whole[stop:], (num_transient, stop)


def test_states_of_one_run_merge_in_whatever_order_their_buckets_were_first_exchanged():
    parameters = {"first": torch.zeros(2), "second": torch.zeros(3)}
    orders = parameters, dict(reversed(parameters.items()))
    states = [
        checkpoint.write("int4", 1, [], {"residual:float32": own}, rank, Grid(2))
        for rank, own in enumerate(orders)
    ]
    assert gradwire.merge_state_dicts(states)["memory"].keys() == {"rank0", "rank1"}


# --- torch.distributed.checkpoint ---


def job_dcp(rank, folder):
    whole, _ = run_whole("int4")
    model, optimizer, wire = make("int4")
    with wire:
        train(model, optimizer, range(3))
        saved = wire.state_dict()
        dcp.save({"model": model.module.state_dict(), "wire": saved}, checkpoint_id=folder)
        optimizer_state = copy.deepcopy(optimizer.state_dict())
        for version, other in ((1, {"loss_scale": None}), (3, {"lanes": 2})):
            kept = {key: value for key, value in saved.items() if key not in other}
            added = {key: value for key, value in other.items() if value is not None}
            check_other_version(wire, {**kept, **added, "version": version}, f"{folder}/{version}")
    model, optimizer, wire = make("int4")
    optimizer.load_state_dict(optimizer_state)
    template = wire.checkpoint_template(dcp.FileSystemReader(folder).read_metadata())
    assert not any(t.any() for t in template["memory"][f"rank{rank}"]["residual:float32"].values())
    loaded = {"model": model.module.state_dict(), "wire": template}
    dcp.load(loaded, checkpoint_id=folder)
    mine = saved["memory"][f"rank{rank}"]["residual:float32"]
    for name, tensor in loaded["wire"]["memory"][f"rank{rank}"]["residual:float32"].items():
        assert torch.equal(tensor, mine[name]), "each rank has its own back"
    wire.load_state_dict(loaded["wire"])
    with wire:
        train(model, optimizer, range(3, NUM_STEPS))
    assert torch.equal(flat(model), whole)
    with pytest.raises(ValueError, match="no wire's state under 'wires'"):
        wire.checkpoint_template(dcp.FileSystemReader(folder).read_metadata(), "wires")
    return {name: tensor.double() for name, tensor in mine.items()}


def check_other_version(wire, state, folder):
    """Check that a state of another version, whose keys may differ, is refused for its version."""
    dcp.save({"wire": state}, checkpoint_id=folder)
    loaded = {"wire": wire.checkpoint_template(dcp.FileSystemReader(folder).read_metadata())}
    dcp.load(loaded, checkpoint_id=folder)
    with pytest.raises(ValueError, match=f"this state has version {state['version']}, "):
        wire.load_state_dict(loaded["wire"])


def job_dcp_elsewhere(rank, folder, residuals):
    model, optimizer, wire = make("int4")
    loaded = {"wire": wire.checkpoint_template(dcp.FileSystemReader(folder).read_metadata())}
    dcp.load(loaded, checkpoint_id=folder)
    wire.load_state_dict(loaded["wire"])
    check_held_back(wire, residuals, "mean")
    train(model, optimizer, range(3, 6))


def check_held_back(wire, residuals, reduction):
    """Check that these ranks hold back, together, what the saved ones did."""
    world_size = dist.get_world_size()
    (mine,) = wire.state_dict()["memory"].values()
    for name, tensor in mine["residual:float32"].items():
        total = tensor.double()
        dist.all_reduce(total)
        saved = sum(each[name] for each in residuals)
        if reduction == "mean":
            total, saved = total / world_size, saved / len(residuals)
        assert torch.allclose(total, saved, rtol=1e-6, atol=1e-12), name


def test_torchs_checkpoints_keep_every_ranks_own_residuals(tmp_path):
    residuals = run_ranks(job_dcp, 2, args=(str(tmp_path),))
    assert any(not torch.equal(residuals[0][name], residuals[1][name]) for name in residuals[0])
    run_ranks(job_dcp_elsewhere, 3, args=(str(tmp_path), residuals))


# --- another number of ranks ---


def job_save(rank, spec, num_steps=4):
    model, optimizer, wire = make(spec)
    train(model, optimizer, range(num_steps))
    return wire.state_dict()


def job_load(rank, spec, states):
    model, _, wire = make(spec)
    with pytest.raises(ValueError, match=r"no 'rank1', only \['rank0'\].*saved on 3 ranks"):
        wire.load_state_dict(states[0])
    wire.load_state_dict(gradwire.merge_state_dicts(states))
    residuals = [state["memory"][f"rank{r}"]["residual:float32"] for r, state in enumerate(states)]
    residuals = [{name: tensor.double() for name, tensor in each.items()} for each in residuals]
    check_held_back(wire, residuals, "sum" if "sum" in spec else "mean")

    # And it counts for as much: without gradients of their own, steps send what was held back.
    scale = 1 if "sum" in spec else 1 / dist.get_world_size()
    held = {name: sum(each[name] for each in residuals) for name in residuals[0]}
    sent = {name: torch.zeros_like(value) for name, value in held.items()}
    for _ in range(3):
        model.zero_grad()
        (0 * model(torch.randn(5, 2, 6, 6), True)).sum().backward()
        for name, p in model.module.named_parameters():
            sent[name] += p.grad.double()
    (mine,) = wire.state_dict()["memory"].values()
    for name, value in held.items():
        left = mine["residual:float32"][name].double()
        dist.all_reduce(left)
        expected = value * (1 if "sum" in spec else 1 / len(residuals))
        assert torch.allclose(sent[name] + left * scale, expected, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("spec", ["int4", "sign:feedback=true,reduction=sum"])
def test_what_is_held_back_survives_a_change_of_the_number_of_ranks(spec):
    states = run_ranks(job_save, 3, args=(spec,))
    for world_size in (1, 2) if spec == "int4" else (4,):
        run_ranks(job_load, world_size, args=(spec, states))


def job_load_any(rank, spec, states):
    model, optimizer, wire = make(spec)
    wire.load_state_dict(gradwire.merge_state_dicts(states))
    (mine,) = wire.state_dict()["memory"].values()
    for key, tensors in mine.items():
        if key.startswith("residual:"):
            saved = [state["memory"][f"rank{r}"][key] for r, state in enumerate(states)]
            for name, tensor in tensors.items():
                total, before = tensor.double(), torch.stack([each[name].double() for each in saved]).sum(0)
                dist.all_reduce(total)
                if "sum" not in spec:
                    total, before = total / dist.get_world_size(), before / len(states)
                rounding = 2**-8 if "bfloat16" in key else 1e-6
                assert (total - before).abs().max() <= rounding * before.abs().max(), (spec, key, name)
    train(model, optimizer, range(states[0]["step"], states[0]["step"] + 3))
    mine = flat(model)
    dist.broadcast(mine, 0)
    assert torch.equal(mine, flat(model))
    assert mine.isfinite().all()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_so_does_what_any_recipe_holds_back(seed):
    choice = random.Random(seed)
    spec = random_spec(choice, feedback=True)
    before, after = choice.sample([1, 2, 3, 4], 2)
    states = run_ranks(job_save, before, args=(spec, choice.randint(1, 6)))
    run_ranks(job_load_any, after, args=(spec, states))


# --- what does not fit ---


def check_frozen_later():
    """Freeze parameters after DDP has made its buckets: they stay in them, and in states."""
    saved = None
    for _ in range(2):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model = DistributedDataParallel(net, find_unused_parameters=True)
        net[0].requires_grad_(False)
        with gradwire.attach(model, "int4") as wire:
            if saved is not None:
                wire.load_state_dict(saved)
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
            saved = wire.state_dict()
            model(torch.ones(2, 3)).sum().backward()
            wire.load_state_dict(saved)
            assert wire.stats().num_steps == 4, "a step that is taken back was sent all the same"
    assert saved["step"] == 6


def job_refusals(rank):
    model, optimizer, wire = make("int4")
    train(model, optimizer, range(2))
    good = wire.state_dict()
    own = f"rank{rank}"

    def damaged(change):
        state = copy.deepcopy(good)
        change(state)
        return state

    def pop(state):
        del state["memory"][own]["residual:float32"]["conv.weight"]

    def add(state):
        state["memory"][own]["residual:float32"]["conv.wait"] = torch.zeros(3)

    def reshape(state):
        state["memory"][own]["residual:float32"]["conv.bias"] = torch.zeros(5)

    def old(state):
        state.update(version=1)
        del state["loss_scale"]

    cases = {
        "has no residual:float32 of parameter 'conv.weight', which was saved": pop,
        "has a residual:float32 of parameter 'conv.wait' that was not saved": add,
        r"parameter 'conv.bias' of rank \d has shape \(5,\), but was saved with shape \(6,\)": reshape,
        "it has no 'step'": lambda state: state.pop("step"),
        "it has an unknown 'steps'": lambda state: state.update(steps=3),
        "version 99, and this gradwire reads version 2": lambda state: state.update(version=99),
        "has version 3, ": lambda state: state.update(version=3, lanes=2),
        "has version 1, ": old,
        f"has no '{own}'": lambda state: state["memory"].clear(),
    }
    for text, change in cases.items():
        with pytest.raises(ValueError, match=text):
            wire.load_state_dict(damaged(change))
    # A state that is bad on one rank alone is an error on all, and on nobody loaded.
    with pytest.raises((ValueError, RuntimeError), match="it has no 'step'"):
        wire.load_state_dict(damaged(lambda state: state.pop("step") if rank == 1 else None))
    with pytest.raises(
        ValueError, match=r"ranks call Wire.load_state_dict with different things: the saved step is "
    ):
        wire.load_state_dict(damaged(lambda state: state.update(step=2 + rank)))
    with pytest.raises(ValueError, match="they differ in 'step'"):
        gradwire.merge_state_dicts([good, {**good, "step": 9}])
    with pytest.raises(ValueError, match="is there twice"):
        gradwire.merge_state_dicts([good, good])

    other = DistributedDataParallel(nn.Linear(3, 3))
    with (
        gradwire.attach(other, "int4") as others,
        pytest.raises(ValueError, match="has a parameter 'conv.bias', which this model has not"),
    ):
        others.load_state_dict(good)
    wider = DistributedDataParallel(nn.Linear(3, 4))
    with gradwire.attach(other, "int4") as others, gradwire.attach(wider, "int4") as wide:
        other(torch.ones(2, 3)).sum().backward()
        with pytest.raises(ValueError, match=r"'bias' with shape \(3,\), .* has shape \(4,\)"):
            wide.load_state_dict(others.state_dict())
    with pytest.raises(RuntimeError, match="detached, and load_state_dict would have no effect"):
        others.load_state_dict(good)
    check_frozen_later()
    after = wire.state_dict()
    assert after["memory"][own]["residual:float32"].keys() == good["memory"][own]["residual:float32"].keys()
    train(model, optimizer, range(2, 4))


def test_a_state_that_does_not_fit_is_refused_and_the_entry_named():
    run_ranks(job_refusals, 2)


def job_half_a_file(rank):
    model, optimizer, wire = make("int4")
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save(wire.state_dict(), file)
    whole = file.getvalue()
    for part in (0, 1, len(whole) // 2, len(whole) - 1):
        with pytest.raises((RuntimeError, EOFError, ValueError, pickle.UnpicklingError)):
            wire.load_state_dict(torch.load(io.BytesIO(whole[:part]), weights_only=True))


def test_a_half_written_file_never_loads():
    run_ranks(job_half_a_file, 1)
