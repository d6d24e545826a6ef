"""Low-rank factors: kernels equal to the reference, what they must survive, and the exchange's laws."""

import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.exchanges import LowRank
from gradwire.exchanges.matrices import plan_of
from gradwire.exchanges.one_shot import one_round_pays
from gradwire.layout import BucketLayout, Slot
from gradwire.ops.cpu import low_rank as cpu
from gradwire.ops.reference import low_rank as reference
from gradwire.testing import VirtualRanks, run_ranks
from tests.test_powersgd_hook import Given, draw, outer

try:
    from gradwire.ops.cuda import low_rank as cuda
except ImportError:  # no Triton for this platform
    cuda = None

SHAPES = [
    (1, 1, 1, 1),
    (3, 7, 40, 1),
    (2, 33, 65, 2),
    (1, 40, 7, 3),
    (2, 64, 64, 4),
    (1, 130, 31, 5),
    (1, 20, 20, 9),
]
KERNELS = [(cpu, torch.float32), (reference, torch.float32), (reference, torch.float64)]
if cuda is not None:
    KERNELS.append((cuda, torch.float32))  # in Triton's interpreter


# --- kernels ---


@pytest.mark.parametrize(("k", "n", "m", "r"), SHAPES)
def test_the_kernels_equal_the_reference_within_rounding(k, n, m, r):
    matrices, left, right, values = draw(1, (k, n, m), (k, r, n), (k, r, m), (k, n, m))
    values[0, 0, 0] = math.nan
    results = []
    for module in (cpu, reference):
        p, q, sums, largest = left.clone(), right.clone(), matrices.clone(), torch.empty(k)
        given, product = values.clone(), torch.empty(k, n, m)
        module.accumulate(list(given), list(sums), largest)
        module.project(sums, right, p)
        module.project_back(sums, left, q)
        module.subtract(sums, left, right)
        module.multiply(left, right, list(product))
        spare, zeros = right.clone(), torch.zeros_like(right)
        module.orthogonalize(spare, None)
        module.orthogonalize(zeros, right)
        again, total = torch.empty_like(p), matrices.clone()
        module.accumulate_and_project(list(values.clone()), total, largest, right, again)
        assert torch.allclose(again, p, atol=1e-3)
        results.append((p, q, sums, total, given, product, spare, zeros, largest.nan_to_num(-1)))
    for fast, slow in zip(*results, strict=True):
        assert torch.allclose(fast, slow, rtol=1e-5, atol=1e-4 * slow.abs().max())
    assert results[0][4][0, 0, 0] == 0, "what is not finite is taken out"


@pytest.mark.parametrize("k", [2, 5])
def test_a_matrix_has_the_same_bits_in_every_batch(k):
    matrices, right = draw(1, (k, 33, 65), (k, 4, 65))
    together, alone = torch.empty(k, 4, 33), torch.empty(k, 4, 33)
    cpu.project(matrices, right, together)
    for i in range(k):
        cpu.project(matrices[i : i + 1].clone(), right[i : i + 1].clone(), alone[i : i + 1])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(("module", "dtype"), KERNELS, ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e-20, 1e-37, 1e30, 1.5e38])
def test_orthogonal_vectors_come_of_whatever_there_is(module, dtype, magnitude):
    a, b, c = draw(3, 50, 50, 50)
    a, b, c = (v.to(dtype) / v.abs().max() for v in (a, b, c))
    # Twice the same, a sum of others, one that is nothing, one that is new.
    vectors = (torch.stack([a, a, b, a + b, torch.zeros(50), c]) * magnitude).to(dtype)[None].clone()
    module.orthogonalize(vectors, None)
    wanted = torch.diag(torch.tensor([1.0, 0, 1, 0, 0, 1], dtype=dtype))
    assert torch.allclose(vectors[0] @ vectors[0].T, wanted, atol=1e-5)
    spanned = torch.stack([a, b, c]).to(dtype)
    assert torch.allclose(spanned @ vectors[0].T @ vectors[0], spanned, atol=1e-4)

    spare = draw(4, (1, 6, 50))[0].to(dtype)
    vectors = (torch.stack([a, a, torch.zeros(50), b, torch.full((50,), math.nan), c])[None] * magnitude).to(
        dtype
    )
    module.orthogonalize(vectors, spare)
    assert torch.allclose(vectors[0] @ vectors[0].T, torch.eye(6, dtype=dtype), atol=1e-5)


@pytest.mark.parametrize(("module", "dtype"), KERNELS, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_shows_unless_there_is_a_spare(module, dtype, poison):
    vectors = draw(5, (1, 4, 20))[0].to(dtype)
    vectors[0, 1, 3] = poison
    module.orthogonalize(vectors, None)
    assert vectors[0, 0].isfinite().all()
    assert vectors[0, 1:].isnan().all()


# --- what becomes of a parameter ---


def layout_of(*shapes, stride=None):
    slots, offset = [], 0
    for i, shape in enumerate(shapes):
        own = stride or torch.empty(shape, device="meta").stride()
        slots.append(Slot(f"p{i}", offset, torch.Size(shape), own))
        offset += math.prod(shape)
    return BucketLayout(0, torch.float32, tuple(slots))


def test_only_what_pays_is_compressed():
    layout = layout_of((40, 20), (20,), (), (40, 20), (0, 7), (1, 500), (6, 4), (64, 3, 3, 3))
    plan = plan_of(layout, 2, 2.0, False)
    assert [(m.name, m.rows, m.columns) for m in plan.matrices] == [
        ("p0", 40, 20),
        ("p3", 40, 20),
        ("p7", 64, 27),
    ]
    assert [len(batch.matrices) for batch in plan.batches] == [2, 1]
    assert plan.num_plain == 20 + 1 + 500 + 24
    assert plan.num_plain + plan.sums.numel == layout.numel
    assert (plan.left.numel, plan.right.numel) == (2 * (40 + 40 + 64), 2 * (20 + 20 + 27))


@pytest.mark.parametrize(
    ("shape", "stride", "matrix"),
    [
        ((6, 4, 3, 3), (36, 1, 12, 4), (6, 36)),  # channels_last
        ((36, 7), (1, 36), (7, 36)),  # transposed
        ((5, 8, 2), (2, 10, 1), (8, 10)),  # neither: the outermost in memory
        ((1, 9), (9, 1), (9, 1)),
    ],
)
def test_a_matrix_is_what_lies_in_memory(shape, stride, matrix):
    (found,) = plan_of(layout_of(shape, stride=stride), 1, 0, False).matrices
    assert (found.rows, found.columns) == matrix


@pytest.mark.parametrize("numel", [1, 3, 4, 17, 97, 9991, 25_000_003])
def test_one_matrix_for_all_is_nearly_square_and_leaves_out_next_to_nothing(numel):
    plan = plan_of(layout_of((numel,)), 1, 2.0, True)
    for matrix in plan.matrices:
        assert matrix.columns <= matrix.rows <= 2 * matrix.columns + 128
        assert plan.num_plain == numel - matrix.numel < max(matrix.columns / 30, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, not 0"),
        ({"start": -1}, "start must be at least 0, not -1"),
        ({"min_compression_rate": -0.5}, "min_compression_rate must be at least 0"),
        ({"min_compression_rate": math.nan}, "min_compression_rate must be at least 0, not nan"),
        ({"num_rounds": 1, "warm_start": False}, "needs its warm start"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        LowRank(**options)


# --- ranks ---


def train(recipe, steps, dtype=torch.float32, check=lambda step, wire, model: None):
    """The averaged gradients of each step, given this rank's own."""
    net = Given(*(g.shape for g in steps[0]), dtype=dtype)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    seen = []
    with gradwire.attach(model, recipe) as wire:
        for step, given in enumerate(steps):
            model.zero_grad()
            model(given).backward()
            seen.append([p.grad.clone() for p in net.values])
            check(step, wire, model)
    return seen


def job_magnitudes(rank):
    for dtype, magnitudes in {
        torch.float32: [1.0, 1e-20, 1e30],
        torch.bfloat16: [1.0, 1e-20],
        torch.float16: [1.0, 1000.0],
    }.items():
        for low_rank in (1, 2, 4):
            for magnitude in magnitudes:
                steps = [[(outer(1, 30, 20) * (s + 1) * magnitude).to(dtype)] for s in range(4)]
                seen = train(f"powersgd:rank={low_rank},min_compression_rate=0", steps, dtype)
                for have, given in zip(seen, steps, strict=True):
                    close = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
                    error = (have[0].double() - given[0].double()).abs().max()
                    # A gradient of 16 bits is not quite of rank one; what is left comes with the next.
                    assert error <= 2 * close * given[0].double().abs().max(), (dtype, low_rank, magnitude)
    steps = [draw(10 * rank + s, (30, 20), (8, 3, 3, 3), (5,)) for s in range(5)]
    wanted = train("fp32", steps)
    for feedback in ("true", "false"):
        full = train(f"powersgd:rank=99,min_compression_rate=0,feedback={feedback}", steps)
        for have, want in zip(full, wanted, strict=True):
            for a, b in zip(have, want, strict=True):
                assert torch.allclose(a, b, atol=1e-5)


def test_a_gradient_of_rank_one_comes_back_whatever_its_size_and_full_rank_is_allreduce():
    run_ranks(job_magnitudes, 2)


def memory_of(wire):
    return wire._bridge.runner.memory.named()


def job_laws(rank):
    world_size = torch.distributed.get_world_size()
    shapes = [(30, 20), (20,), (30, 20), (40, 10)]
    for spec in ("powersgd:rank=2", "acp:rank=2", "powersgd:rank=1,whole=true", "acp:rank=2,reduction=sum"):
        recipe = gradwire.recipe(spec)
        steps = [draw(10 * rank + s, *shapes) for s in range(6)]
        kept = {}

        def note(step, wire, model, kept=kept, recipe=recipe, rank=rank):
            kept.update(memory_of(wire))
            (layout,) = wire.layout()
            promised = recipe.exchange.bucket_bytes(layout, rank, world_size, step)
            extra = (
                4 * (world_size - 1) if recipe.exchange.whole else 0
            )  # votes for parameters without gradients
            assert wire.stats().steps[-1].buckets[0].bytes_sent == promised + extra
            assert all(v.isfinite().all() for state in memory_of(wire).values() for v in state.values())

        seen = train(recipe, steps, check=note)
        factor = 1 if recipe.reduction == "sum" else world_size
        names = set(kept["residual"])
        assert names == ({f"values.{i}" for i in (range(4) if recipe.exchange.whole else (0, 2, 3))})
        for i, shape in enumerate(shapes):
            given = sum(grads[i].double() for grads in steps)
            residual = kept["residual"].get(f"values.{i}", torch.zeros(shape)).double()
            total = torch.stack([given, residual])
            torch.distributed.all_reduce(total)
            have = factor * sum(grads[i].double() for grads in seen)
            assert torch.allclose(have + total[1], total[0], atol=1e-4), (spec, i)
            if i == 1 and not recipe.exchange.whole:
                assert torch.allclose(have, total[0], atol=1e-5), "what is not compressed is exact"


def job_large_factors(rank):
    """Factors of 25 kB and more go in two rounds instead of one."""
    one = outer(1, 3000, 8)
    for spec in ("powersgd:min_compression_rate=0", "acp:min_compression_rate=0"):
        seen = train(spec, [[one * (rank + 1)] for _ in range(4)])
        # ACP-SGD, which finds one factor a step, takes a few to come close.
        assert (seen[-1][0] - 2 * one).norm() < 0.05 * (2 * one).norm(), spec


def test_large_factors_of_three_ranks_are_summed_in_two_rounds():
    run_ranks(job_large_factors, 3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_sent_and_what_is_kept_make_up_what_there_was(world_size):
    run_ranks(job_laws, world_size)


@pytest.mark.parametrize("spec", ["powersgd:rank=4", "acp:rank=4"])
def test_factors_that_take_two_rounds_are_summed_without_what_is_held_back(spec):
    net = torch.nn.Linear(3000, 40)
    ranks = VirtualRanks(net, spec, world_size=3)
    given, sent = torch.zeros_like(net.weight), torch.zeros_like(net.weight)
    for step in range(3):
        for rank in range(3):
            torch.manual_seed(10 * step + rank)
            with ranks.backward_of(rank):
                net(torch.randn(8, 3000)).square().mean().backward()
            given += ranks.gradients(rank)["weight"] / 3
        ranks.average()
        sent += ranks.gradients(2)["weight"]
    assert not one_round_pays(4 * 4 * 3000, 3), "the longer factor"
    held = sum(memory.named()["residual"]["weight"] for memory in ranks.memories) / 3
    assert held.norm() > 0.1 * given.norm()
    torch.testing.assert_close(sent + held, given, rtol=1e-4, atol=1e-6)


def job_steps_that_do_not_count(rank):
    for spec in ("powersgd:rank=2", "acp:rank=2"):
        steps = [draw(10 * rank + s, (30, 20), (40, 20)) for s in range(9)]
        for step in (3, 4):
            steps[step][0][1, 1] = math.nan if rank == 0 else 1.0
        for step in (6, 7):
            steps[step][0].zero_()
        before = {}

        def compare(step, wire, model, before=before):
            now = {
                (state, name): value.clone()
                for state, values in memory_of(wire).items()
                for name, value in values.items()
                if name == "values.0"
            }
            residual = ("residual", "values.0")
            if step in (3, 4, 6, 7):
                exact = step > 4  # else the gradient was added and taken away again
                assert torch.allclose(now[residual], before[residual], rtol=0, atol=0 if exact else 1e-6)
            before.clear()
            before.update(now)

        seen = train(spec, steps, check=compare)
        for step, grads in enumerate(seen):
            assert grads[0].isfinite().all() == (step not in (3, 4)), step
            assert grads[1].isfinite().all(), "what shares the bucket is spared"
            assert (grads[0] == 0).all() == (step in (6, 7)), step


def test_a_gradient_that_is_not_finite_or_missing_leaves_the_memory_as_it_was():
    run_ranks(job_steps_that_do_not_count, 2)


def job_lost_directions(rank):
    """A rank-1 gradient uses one direction; those that it leaves idle must come back when they are needed."""
    steps = [[outer(1, 30, 20)]] * 5 + [[outer(2, 30, 20) + outer(3, 30, 20)]] * 3
    seen = train("powersgd:rank=2,feedback=false", steps)
    assert torch.allclose(seen[-1][0], steps[-1][0], atol=1e-4)


def test_an_idle_direction_comes_back():
    run_ranks(job_lost_directions, 2)


def job_start(rank):
    steps = [draw(10 * rank + s, (30, 20)) for s in range(4)]
    wanted, seen = train("fp32", steps), train("powersgd:rank=1,start=2", steps)
    equal = [torch.equal(a[0], b[0]) for a, b in zip(seen, wanted, strict=True)]
    assert equal == [True, True, False, False]


def test_the_first_steps_are_plain_until_the_start():
    run_ranks(job_start, 2)
