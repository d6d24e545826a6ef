"""Virtual ranks: the same exchanges, in one process, with the same bits."""

import copy
import operator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.exchanges import Context, Scratch, average
from gradwire.peers.gloo import open_gloo
from gradwire.peers.groups import gather
from gradwire.testing import RanksFailed, VirtualRanks, run_ranks, run_virtual_ranks
from tests.rows import ROWS

MORE_SPECS = ["int4:rounding=stochastic,seed=3", "sign:feedback=true,residual=bf16", "int2:seed=3,block=256"]
# A matrix and a vector, one value, and more ranks than aligned chunks.
SHAPES = [[(40, 30), (17,)], [(1,)], [(24, 16), (24, 16), (200,)]]
NUM_STEPS = 3


def layouts():
    made = []
    for index, shapes in enumerate(SHAPES):
        slots = [
            Slot(f"p{index}.{number}", 0, torch.Size(shape), torch.empty(shape, device="meta").stride())
            for number, shape in enumerate(shapes)
        ]
        made.append(BucketLayout.packed(index, torch.float32, slots))
    return made


def averages(group, specs):
    """Return the results of each recipe for three buckets in three steps, and its states."""
    found = {}
    for spec in specs:
        recipe, memory, scratch = gradwire.recipe(spec), Memory(), Scratch()
        scale = 1.0 if recipe.reduction == "sum" else 1 / group.size
        before = group.traffic.bytes_sent
        results = []
        for step in range(NUM_STEPS):
            for layout in layouts():
                seed = 1000 * step + 100 * layout.index + group.rank
                flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))
                average(flat, recipe.exchange, Context(group, scratch, scale, layout, memory, step))
                results.append(flat)
        residuals = [r.clone() for states in memory.named().values() for r in states.values()]
        found[spec] = results, residuals, group.traffic.bytes_sent - before
    return found


def job_averages(rank, specs):
    group = open_gloo(dist.group.WORLD, "virtual-test")
    try:
        return averages(group, specs)
    finally:
        dist.barrier()
        group.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_virtual_ranks_end_with_the_bits_bytes_and_residuals_of_real_ones(world_size):
    rows = [row for row in ROWS if row.exchange.communicates and world_size in row.world_sizes]
    specs = [row.spec for row in rows] + MORE_SPECS
    real = run_ranks(job_averages, world_size, 240, args=(specs,))
    virtual = run_virtual_ranks(lambda group: averages(group, specs), world_size)
    for rank in range(world_size):
        for spec in specs:
            for here, there in zip(virtual[rank][spec][:2], real[rank][spec][:2], strict=True):
                assert len(here) == len(there)
                assert all(map(torch.equal, here, there)), f"{spec} on rank {rank}"
            assert virtual[rank][spec][2] == real[rank][spec][2], f"bytes of {spec} on rank {rank}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 96 * 40).sin().view(96, 40))

    def forward(self, x):
        return (x @ self.weight).tanh()


def batch(step, rank):
    return torch.randn(5, 96, generator=torch.Generator().manual_seed(100 * step + rank))


class Odd(nn.Module):
    """A model that hooks stumble over: tied, frozen, unused, empty, 0-d, 16-bit and complex parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 16)
        self.inner = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.short = nn.Parameter(torch.randn(16, dtype=torch.bfloat16))
        self.turn = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(2, 2)

    def forward(self, words, use_all):
        x = self.frozen(self.inner(self.table(words))) * self.short.float() + self.empty.sum()
        x = (x.to(self.turn.dtype) @ self.turn).abs() * self.gain
        return (self.sometimes(x) if use_all else x) @ self.table.weight.T


def loss_of(model, step, rank):
    words = torch.randint(30, (7,), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(words, step % 2 == 0), words.roll(1))


class Whole(Odd):
    """The same model with every parameter used in every step."""

    def forward(self, words, use_all):
        return super().forward(words, True) + self.never.weight.sum() * self.never.bias.sum()


UNUSED = {"find_unused_parameters": True}
FORMS = [  # small buckets, so that there are several
    ("fp32", Whole, {}),
    ("int4", Whole, {"bucket_cap_mb": 0.002}),
    ("int4", Odd, {"bucket_cap_mb": 0.002, **UNUSED}),
    ("int4:rounding=stochastic,seed=3", Whole, {}),
    ("int4:local_size=2,reduction=sum", Whole, {"bucket_cap_mb": 0.002}),
    ("sign:feedback=true", Odd, UNUSED),
    ("powersgd:rank=2", Whole, {"bucket_cap_mb": 0.002}),
    ("acp:rank=2,factors=int8", Odd, UNUSED),
    ("route(*.bias=fp32; numel>=300=fp8; *=bf16)", Whole, {}),
    ("schedule(0=int4; 1=powersgd:rank=2; 3=sign:feedback=true)", Whole, {"bucket_cap_mb": 0.002}),
]


def go_on(model, backward, wire, steps, start):
    """Train from a state or from the beginning, and return the state that is reached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if start is not None:
        for one, state in zip((model, optimizer, wire), start.values(), strict=True):
            one.load_state_dict(state)
    for step in steps:
        optimizer.zero_grad()
        backward(step)
        optimizer.step()
    reached = {"model": model, "optimizer": optimizer, "wire": wire}
    return {name: copy.deepcopy(one.state_dict()) for name, one in reached.items()}


def train_virtually(form, steps, start=None):
    spec, kind, options = form
    model = kind()
    ranks = VirtualRanks(model, spec, world_size=4, **options)

    def backward(step):
        for rank in range(4):
            with ranks.backward_of(rank):
                loss_of(model, step, rank).backward()
        ranks.average()

    return go_on(model, backward, ranks, steps, start)


def train_really(rank, form, steps, start=None):
    spec, kind, options = form
    model = DistributedDataParallel(kind(), **options)
    with gradwire.attach(model, spec) as wire:
        return go_on(model.module, lambda step: loss_of(model, step, rank).backward(), wire, steps, start)


EARLY, LATE = range(3), range(3, 5)


def job_train(rank, path):
    """Run each form from the beginning, and on from the state of virtual ranks."""
    starts = zip(FORMS, torch.load(path), strict=True)
    return [(train_really(rank, form, EARLY), train_really(rank, form, LATE, at)) for form, at in starts]


def require_same(have, want, where):
    """Check that every tensor and number is the same."""
    if isinstance(want, dict):
        assert have.keys() == want.keys(), where
        for key in want:
            require_same(have[key], want[key], (*where, key))
    else:
        equal = torch.equal if isinstance(want, torch.Tensor) else operator.eq
        assert equal(have, want), where


def test_training_on_virtual_ranks_ends_with_the_weights_and_the_state_of_ddp_and_goes_on_from_there(
    tmp_path,
):
    virtual = [train_virtually(form, EARLY) for form in FORMS]
    torch.save(virtual, tmp_path / "virtual.pt")
    real = run_ranks(job_train, 4, args=(tmp_path / "virtual.pt",))
    for number, form in enumerate(FORMS):
        for when in (0, 1):
            reached = [real[rank][number][when] for rank in range(4)]
            wire = gradwire.merge_state_dicts(each.pop("wire") for each in reached)
            if when == 0:
                have = virtual[number]
                start = {**reached[0], "wire": wire}
            else:
                have = train_virtually(form, LATE, start)
            for rank in range(4):
                require_same(have, {**reached[rank], "wire": wire}, (form, when, rank))


def test_gradients_that_are_put_in_the_place_of_a_ranks_own_are_averaged():
    model, means = Net(), []
    for habit in (lambda: None, model.zero_grad):
        ranks = VirtualRanks(model, "fp32", world_size=2)
        for rank in range(2):
            with ranks.backward_of(rank):
                habit()  # as many training loops begin; it takes .grad away
                model(batch(0, rank)).square().mean().backward()
        ranks.average()
        means.append(model.weight.grad.clone())
    assert means[0].any()
    assert torch.equal(*means)


def test_several_backward_passes_of_a_rank_add_up_over_many_ranks_and_buckets():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 20), nn.Linear(20, 7))
    inputs = torch.randn(32, 2, 4, 30)
    ranks = VirtualRanks(model, "fp32", world_size=32, bucket_cap_mb=0.0005)
    for _ in range(3):  # DDP has one bucket in its first steps
        for rank in range(32):
            with ranks.backward_of(rank):
                for micro_batch in inputs[rank]:
                    model(micro_batch).square().mean().backward()
        ranks.average()
    assert len(ranks.layouts) >= 3
    have = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (2 * model(inputs.view(-1, 30)).square().mean()).backward()
    for got, parameter in zip(have, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)


def test_what_32_workers_hold_back_is_what_the_means_lack():
    model = Net()
    ranks = VirtualRanks(model, "sign:feedback=true", world_size=32)
    sent = torch.zeros(96, 40)
    given = torch.zeros(96, 40)
    for step in range(5):
        for rank in range(32):
            with ranks.backward_of(rank):
                model(batch(step, rank)).square().mean().backward()
            given += ranks.gradients(rank)["weight"]
        ranks.average()
        sent += model.weight.grad
    held = sum(memory.named()["residual"]["weight"] for memory in ranks.memories)
    torch.testing.assert_close(given, 32 * sent + held, rtol=1e-4, atol=1e-6)
    assert held.abs().max() > 1e-3
    expected = [5 * ranks.recipe.wire_bytes(96 * 40, rank=rank, world_size=32) for rank in range(32)]
    assert [traffic.bytes_sent for traffic in ranks.traffic] == expected


def steps_of(ranks, model, steps):
    for step in steps:
        for rank in range(ranks.world_size):
            with ranks.backward_of(rank):
                model(batch(step, rank)).square().mean().backward()
        ranks.average()
    return {name: gradient.clone() for name, gradient in ranks.gradients(0).items()}


@pytest.mark.parametrize("spec", ["int4", "powersgd:rank=2", "schedule(0=int4; 4=sign)"])
def test_virtual_ranks_go_on_from_their_state_bit_for_bit(spec, tmp_path):
    model = Net()
    ranks = VirtualRanks(model, spec, world_size=4)
    steps_of(ranks, model, range(3))
    torch.save(ranks.state_dict(), tmp_path / "ranks.pt")
    expected = steps_of(ranks, model, range(3, 6))
    others = VirtualRanks(model, spec, world_size=4)
    others.load_state_dict(torch.load(tmp_path / "ranks.pt", weights_only=True))
    assert others.num_steps == 3
    have = steps_of(others, model, range(3, 6))
    assert all(torch.equal(have[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="the state has no parameter 'bias', which this model has"):
        VirtualRanks(nn.Linear(3, 2), spec, world_size=4).load_state_dict(ranks.state_dict())


def test_averaging_before_every_rank_has_gradients_is_refused():
    model = Net()
    ranks = VirtualRanks(model, "fp32", world_size=3)
    with ranks.backward_of(1):
        model(batch(0, 1)).sum().backward()
    with pytest.raises(ValueError, match=r"rank\(s\) 0, 2 have no gradients"):
        ranks.average()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Net(), "noop", 2), "noop leaves every rank its own gradients, so virtual ranks"),
        ((nn.Linear(3, 2), "route(bias=noop; *=int8)", 2), "leaves every rank its own gradients"),
        ((Net(), "route(bias=fp32; *=int8)", 2), "no parameter goes by the route 'bias'"),
        ((Net(), "int8:local_size=2", 3), "3 ranks cannot be nodes of 2"),
        ((nn.Embedding(4, 2, sparse=True), "int8", 2), "are sparse"),
        ((Net(), "fp32", 0), "at least 1, not 0"),
        ((nn.ReLU(), "fp32", 2), "nothing to average"),
        ((Net(), "fp23", 2), "did you mean"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        VirtualRanks(*arguments)


def test_the_error_of_one_virtual_rank_ends_all():
    def fail(group):
        if group.rank == 1:
            raise KeyError("the reason")
        gather(list(torch.zeros(group.size, 2)), group)

    with pytest.raises(RanksFailed, match="KeyError: 'the reason'") as caught:
        run_virtual_ranks(fail, 3)
    assert set(caught.value.errors) == {1}


def test_ranks_that_all_wait_are_told_instead_of_hanging():
    def silent(group):
        if group.rank != 1:  # which leaves at once
            gather(list(torch.zeros(group.size, 2)), group)

    with pytest.raises(RanksFailed, match="no message from rank 1: every rank that is still there waits"):
        run_virtual_ranks(silent, 3)


def test_gradients_that_are_written_in_place_are_averaged_like_those_of_backward_passes():
    results = []
    for writes in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(30, 20)
        ranks = VirtualRanks(model, "int4", world_size=3, arrival=["bias", "weight"])
        for step in range(3):
            for rank in range(3):
                batch = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + rank))
                if writes:
                    views, loss = ranks.gradients(rank), model(batch).square().mean()
                    weight, bias = torch.autograd.grad(loss, [model.weight, model.bias])
                    views["weight"].copy_(weight)
                    views["bias"].copy_(bias)
                else:
                    with ranks.backward_of(rank):
                        model(batch).square().mean().backward()
            if writes:
                ranks.take_gradients()
            ranks.average()
        results.append((model.weight.grad.clone(), model.bias.grad.clone()))
    for backward, written in zip(*results, strict=True):
        assert torch.equal(backward, written)
        assert written.any()


def test_gradients_cannot_be_written_in_place_where_buckets_are_made_anew():
    model = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60))
    ranks = VirtualRanks(model, "int8", world_size=2, bucket_cap_mb=0.01)
    for rank in range(2):
        with ranks.backward_of(rank):
            model(torch.randn(2, 60)).mean().backward()
    ranks.average()
    ranks.take_gradients()  # the step that was laid out as the first one
    ranks.average()
    with pytest.raises(ValueError, match="laid out anew in this step: give arrival="):
        ranks.take_gradients()
