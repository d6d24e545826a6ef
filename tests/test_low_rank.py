"""Low-rank factors: kernels equal the reference, extreme values survive, and the exchange's laws hold."""

import contextlib
import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradwire
from gradwire.buckets.layout import BucketLayout, Slot
from gradwire.buckets.memory import Memory
from gradwire.ddp import attachment_of
from gradwire.exchanges import Context, LowRank, Scratch, average
from gradwire.exchanges.matrices import plan_of
from gradwire.exchanges.one_shot import one_round_pays
from gradwire.exchanges.unused import _sizes
from gradwire.ops.batches import Batch, Batches, Matrix
from gradwire.ops.cpu import low_rank as cpu
from gradwire.ops.cpu import many_vectors, orthogonal
from gradwire.ops.reference import low_rank as reference
from gradwire.testing import VirtualRanks, run_ranks, run_virtual_ranks
from tests.drawn_buckets import Given, draw, outer

try:
    from gradwire.ops.cuda import low_rank as cuda
    from gradwire.ops.cuda import orthogonal as cuda_orthogonal
except ImportError:  # no Triton for this platform
    cuda = None

# Vectors, one value, wide, tall, odd, and two of a kind: matrices of several shapes in one bucket.
SHAPES = [(7, 40), (33, 65), (), (7, 40), (40, 7), (1, 1), (3,), (64, 64), (130, 31), (20, 20), (7, 40)]
KERNELS = [(cpu, torch.float32), (reference, torch.float32), (reference, torch.float64)]
if cuda is not None:
    KERNELS.append((cuda, torch.float32))  # in Triton's interpreter
FAST = [module for module in (cpu, cuda) if module is not None]


def layout_of(*shapes, stride=None, dtype=torch.float32):
    strides = [stride or torch.empty(shape, device="meta").stride() for shape in shapes]
    own = zip(shapes, strides, strict=True)
    slots = [Slot(f"p{i}", 0, torch.Size(shape), stride) for i, (shape, stride) in enumerate(own)]
    return BucketLayout.packed(0, dtype, slots)


# --- kernels ---


def all_kernels(module, plan, flat):
    """Return the results of each kernel for a bucket with two matrices that do not count."""
    sums, left, right = draw(1, plan.sums.numel, plan.left.numel, plan.right.numel)
    own_left, own_right = draw(2, plan.left.numel, plan.right.numel)
    votes, batches, bucket = torch.empty(plan.num_matrices), plan.batches, flat.clone()
    found = {}
    p, q = torch.empty_like(left), torch.empty_like(right)
    module.accumulate_and_project(batches, bucket, sums, votes, right, p)
    assert torch.equal(bucket.nan_to_num(), flat.nan_to_num()), "values are left alone"
    found.update(votes=votes.clone(), sums=sums.clone(), p=p)
    module.project_back(batches, sums, left, q)
    found.update(q=q)
    again, other = torch.empty_like(right), draw(1, plan.sums.numel)[0]
    module.accumulate_and_project_back(batches, bucket, other, votes, left, again)
    assert torch.equal(other, sums)
    found.update(again=again)
    for side, factor in (("left", own_left), ("right", own_right)):
        for spare in (None, left if side == "left" else right):
            vectors = factor.clone()
            vectors[:20] = 0
            module.orthogonalize(batches, side, vectors, spare)
            found[side, spare is None] = vectors
    infinite, kept = right.clone(), torch.zeros_like(right)
    infinite[-1] = math.inf
    module.judge(batches, "right", infinite, votes, kept)
    found.update(verdict=votes.clone(), kept=kept)
    module.finish(batches, bucket, sums, left, right, own_left, own_right, votes)
    found.update(bucket=bucket, residual=sums)
    without = flat.clone()
    module.finish(batches, without, None, left, right, own_left, own_right, votes)
    assert torch.allclose(without, bucket, atol=1e-5, equal_nan=True)
    return found


@pytest.mark.parametrize(
    ("module", "rank"), [*((module, rank) for module in FAST for rank in (1, 2, 4, 5, 9)), (cpu, 40)]
)
def test_the_kernels_equal_the_reference_within_rounding(module, rank):
    plan = plan_of(layout_of(*SHAPES), rank, 0, False)
    (flat,) = draw(3, layout_of(*SHAPES).numel)
    first, second = plan.batches.matrices[:2]
    flat[first.start + 3], flat[first.start + 5] = math.nan, -math.inf
    flat[second.start : second.start + second.numel] = 0
    fast, slow = all_kernels(module, plan, flat), all_kernels(reference, plan, flat)
    for name, have in fast.items():
        close = 1e-4 * slow[name].nan_to_num(0, 0, 0).abs().max()
        assert torch.allclose(have, slow[name], rtol=1e-5, atol=close, equal_nan=True), name
    votes, verdict = fast["votes"], fast["verdict"]
    assert [votes[0].isnan(), votes[1], votes[2:].eq(1).all()] == [True, 0, True]
    assert verdict[-1].isnan(), "a factor that is not finite does not count either"
    assert torch.equal(fast["kept"] != 0, expand(plan, "right", verdict > 0))
    values = [v for batch in plan.batches for v in batch.values(fast["bucket"])]
    assert [values[0].isnan().all(), (values[1] == 0).all(), values[-1].isnan().all()] == [True] * 3
    assert all(v.isfinite().all() for v in values[1:-1])
    before = draw(1, plan.sums.numel)[0]
    for batch in plan.batches:
        for k, (old, new) in enumerate(zip(batch.sums(before), batch.sums(fast["residual"]), strict=True)):
            if not verdict[batch.first + k] > 0:
                assert torch.allclose(old, new, atol=1e-6), "as it was"


def expand(plan, side, flags):
    """Repeat each matrix's flag for every value of its factor."""
    out = torch.empty(plan.left.numel if side == "left" else plan.right.numel, dtype=torch.bool)
    for batch in plan.batches:
        batch.factors(side, out).copy_(batch.each(flags).view(-1, 1, 1))
    return out


def test_half_precision_buckets_go_through_the_same_kernels():
    plan = plan_of(layout_of((33, 65), (40, 7), dtype=torch.bfloat16), 2, 0, False)
    flat = draw(3, 33 * 65 + 280)[0].bfloat16()
    for module in [m for m in (cuda,) if m is not None]:
        fast, slow = all_kernels(module, plan, flat), all_kernels(reference, plan, flat)
        for name, have in fast.items():
            close = 0.01 * slow[name].nan_to_num(0, 0, 0).abs().max()
            assert torch.allclose(have, slow[name], atol=close, equal_nan=True), name


@pytest.mark.parametrize("rank", [4, 20])
def test_a_matrix_has_the_same_bits_in_every_bucket(rank):
    shapes = [(33, 65), (33, 65), (40, 7)]
    plan = plan_of(layout_of(*shapes), rank, 0, False)
    (flat,) = draw(1, plan.sums.numel)
    together = all_kernels(cpu, plan, flat)
    for batch in plan.batches:
        for k, matrix in enumerate(batch.matrices):
            alone = plan_of(layout_of((matrix.rows, matrix.columns)), rank, 0, False)
            votes, right = torch.empty(1), batch.factors("right", draw(1, *sizes_of(plan))[2])[k].flatten()
            values, left = batch.values(flat)[k].flatten(), torch.empty(alone.left.numel)
            sums = batch.sums(draw(1, plan.sums.numel)[0])[k].flatten().clone()
            cpu.accumulate_and_project(alone.batches, values, sums, votes, right, left)
            assert torch.equal(left, batch.factors("left", together["p"])[k].flatten())


@pytest.mark.parametrize(("rows", "columns"), [(75, 1061), (300, 49), (33, 33)])
@pytest.mark.parametrize("rank", [5, 16, 33])
def test_products_of_many_vectors_are_exact_whatever_their_tiles(rows, columns, rank):
    """Blocks, panels, lines and single numbers, each with a rest."""
    matrix, values, left, right, own = (
        each.numpy()
        for each in draw(6, (rows, columns), (rows, columns), (rank, rows), *2 * [(rank, columns)])
    )
    total = matrix.astype(np.float64) + values
    found, back, again = np.empty_like(left), np.empty_like(right), np.empty_like(right)
    other = matrix.copy()
    assert many_vectors.accumulate_and_project(values, matrix, right, found) == 1
    assert many_vectors.project_back(values, other, True, left, again) == 1
    many_vectors.project_back(matrix, matrix, False, left, back)
    many_vectors.finish(left, right, left, own, matrix, True, values)
    assert np.array_equal(back, again)
    close = {"rtol": 0, "atol": 2e-6 * max(rows, columns, rank)}
    np.testing.assert_allclose(found, right @ total.T, **close)
    np.testing.assert_allclose(back, left @ total, **close)
    np.testing.assert_allclose(values, left.T.astype(np.float64) @ right, **close)
    np.testing.assert_allclose(matrix, total - left.T.astype(np.float64) @ own, **close)


def test_a_number_of_a_product_has_the_same_bits_wherever_it_lies():
    left, right = (each.numpy() for each in draw(7, (20, 77), (20, 131)))
    whole = np.empty((77, 131), np.float32)
    many_vectors.finish(left, right, left, right, whole, False, whole)
    for rows, columns in (
        (slice(0, 1), slice(3, 4)),
        (slice(5, 50), slice(17, 131)),
        (slice(9, 77), slice(1, 36)),
    ):
        p, q = np.ascontiguousarray(left[:, rows]), np.ascontiguousarray(right[:, columns])
        part = np.empty((p.shape[1], q.shape[1]), np.float32)
        many_vectors.finish(p, q, p, q, part, False, part)
        assert np.array_equal(part, whole[rows, columns])


def sizes_of(plan):
    return plan.sums.numel, plan.left.numel, plan.right.numel


def one_factor(module, vectors, spare):
    """Orthogonalize the left factor of one matrix, (rank, length)."""
    batches = Batches(
        (Batch((Matrix("", 0, vectors.shape[1], vectors.shape[0]),), vectors.shape[0], 0, 0, 0, 0),)
    )
    module.orthogonalize(batches, "left", vectors.view(-1), None if spare is None else spare.view(-1))


@pytest.mark.parametrize(("module", "dtype"), KERNELS, ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e-20, 1e-37, 1e30, 1.5e38])
def test_orthogonal_vectors_come_of_whatever_there_is(module, dtype, magnitude):
    a, b, c = draw(3, 50, 50, 50)
    a, b, c = (v.to(dtype) / v.abs().max() for v in (a, b, c))
    # Twice the same, a sum of others, one that is nothing, one that is new.
    vectors = (torch.stack([a, a, b, a + b, torch.zeros(50), c]) * magnitude).to(dtype)
    one_factor(module, vectors, None)
    wanted = torch.diag(torch.tensor([1.0, 0, 1, 0, 0, 1], dtype=dtype))
    assert torch.allclose(vectors @ vectors.T, wanted, atol=1e-5)
    spanned = torch.stack([a, b, c]).to(dtype)
    assert torch.allclose(spanned @ vectors.T @ vectors, spanned, atol=1e-4)

    spare = draw(4, (6, 50))[0].to(dtype)
    given = torch.stack([a, a, torch.zeros(50), b, torch.full((50,), math.nan), c])
    vectors = (given * magnitude).to(dtype)
    one_factor(module, vectors, spare)
    assert torch.allclose(vectors @ vectors.T, torch.eye(6, dtype=dtype), atol=1e-5)


@pytest.mark.parametrize(("module", "dtype"), KERNELS, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_shows_unless_there_is_a_spare(module, dtype, poison):
    vectors = draw(5, (4, 20))[0].to(dtype)
    vectors[1, 3] = poison
    one_factor(module, vectors, None)
    assert vectors[0].isfinite().all()
    assert vectors[1:].isnan().all()


@pytest.mark.parametrize(
    ("angle", "at_once"),
    [(1.0, True), (1e-3, True), (1e-5, False), (0.0, False), (math.nan, False), (math.inf, False)],
)
def test_vectors_are_made_orthogonal_at_once_unless_they_are_too_much_alike(angle, at_once):
    vectors, directions, spare = draw(8, (12, 101), (12, 101), (12, 101))
    vectors *= 10.0 ** (3 * torch.arange(12.0) - 20)[:, None]
    for i in (5, 10):  # the one before, and a little of something new
        vectors[i] = vectors[i - 1] + angle * vectors[i - 1].norm() * directions[i]
    before, given = vectors.clone(), vectors.double()
    assert orthogonal._orthogonalize_at_once(vectors.numpy()) == at_once
    assert at_once or torch.equal(vectors.nan_to_num(), before.nan_to_num()), "left as they were"
    found = before.clone()
    one_factor(cpu, found, spare)
    torch.testing.assert_close(found @ found.T, torch.eye(12), rtol=0, atol=2e-6)
    if at_once:
        assert torch.equal(found, vectors)
        scaled = given / given.norm(dim=1, keepdim=True)
        shares = scaled @ found.double().T
        torch.testing.assert_close(shares @ found.double(), scaled, rtol=0, atol=1e-5)
        torch.testing.assert_close(shares.triu(1), torch.zeros_like(shares), rtol=0, atol=2e-6)  # in order
        assert (shares.diag() > 0).all()


@pytest.mark.skipif(cuda is None, reason="needs Triton")
@pytest.mark.parametrize(("angle", "at_once"), [(1.0, True), (0.1, True), (1e-4, False), (0.0, False)])
def test_triton_makes_vectors_orthogonal_at_once_unless_they_are_too_much_alike(angle, at_once, monkeypatch):
    vectors, directions, spare = draw(8, (12, 301), (12, 301), (12, 301))
    vectors *= 10.0 ** (3 * torch.arange(12.0) - 20)[:, None]
    vectors[5] = vectors[4] + angle * vectors[4].norm() * directions[5]
    found, given, calls = vectors.clone(), vectors.double(), []
    one_by_one = cuda_orthogonal._one_by_one
    monkeypatch.setattr(cuda_orthogonal, "_one_by_one", lambda *args: calls.append(args) or one_by_one(*args))
    one_factor(cuda, found, spare)
    assert bool(calls) == (not at_once)
    torch.testing.assert_close(found @ found.T, torch.eye(12), rtol=0, atol=3e-6)
    scaled = given / given.norm(dim=1, keepdim=True)
    if angle:
        torch.testing.assert_close(scaled @ found.double().T @ found.double(), scaled, rtol=0, atol=1e-5)
    assert ((scaled @ found.double().T).tril() - scaled @ found.double().T).abs().max() < 1e-5


# --- what becomes of a parameter ---


def test_only_what_pays_is_compressed():
    layout = layout_of((40, 20), (20,), (), (40, 20), (0, 7), (1, 500), (6, 4), (64, 3, 3, 3))
    plan = plan_of(layout, 2, 2.0, False)
    assert [(m.name, m.rows, m.columns) for m in plan.batches.matrices] == [
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
    ],
)
def test_a_matrix_is_what_lies_in_memory(shape, stride, matrix):
    (found,) = plan_of(layout_of(shape, stride=stride), 1, 0, False).batches.matrices
    assert (found.rows, found.columns) == matrix


@pytest.mark.parametrize("numel", [1, 3, 4, 17, 97, 9991, 25_000_003])
def test_one_matrix_for_all_is_nearly_square_and_leaves_out_next_to_nothing(numel):
    plan = plan_of(layout_of((numel,)), 1, 2.0, True)
    for matrix in plan.batches.matrices:
        assert matrix.columns <= matrix.rows <= 2 * matrix.columns + 128
        assert plan.num_plain == numel - matrix.numel < max(matrix.columns / 30, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, not 0"),
        ({"start": -1}, "start must be at least 0, not -1"),
        ({"min_compression_rate": -0.5}, "min_compression_rate must be at least 0"),
        ({"min_compression_rate": math.nan}, "min_compression_rate must be at least 0, not nan"),
        ({"num_rounds": 1, "warm_start": False}, "leave warm_start on"),
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
    return attachment_of(wire).state.memory.named()


def job_laws(rank):
    world_size = torch.distributed.get_world_size()
    shapes = [(30, 20), (20,), (30, 20), (40, 10)]
    for spec in (
        "powersgd:rank=2",
        "acp:rank=2",
        "powersgd:rank=1,whole=true",
        "acp:rank=2,reduction=sum",
        "powersgd:rank=4,factors=int4",
        "acp:rank=4,factors=int8,reduction=sum",
        "powersgd:rank=4,factors=int2",
        "acp:rank=4,factors=int2,reduction=sum",
    ):
        recipe = gradwire.recipe(spec)
        steps = [draw(10 * rank + s, *shapes) for s in range(6)]
        kept = {}

        def note(step, wire, model, kept=kept, recipe=recipe, rank=rank):
            kept.update(memory_of(wire))
            (layout,) = wire.layout()
            promised = sum(recipe.exchange.link_bytes(layout, world_size, step)[rank])
            extra = (
                8 * (world_size - 1) if recipe.exchange.whole else 0
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
    for spec in ("powersgd:rank=4,min_compression_rate=0", "acp:rank=4,min_compression_rate=0"):
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


# --- many ranks in one process ---


def run_steps(group, exchange, layout, steps, memory, first_step=0):
    """The averaged buckets of each step, given this rank's own."""
    scratch, seen = Scratch(), []
    for step, given in enumerate(steps, first_step):
        flat = given.clone()
        average(flat, exchange, Context(group, scratch, 1 / group.size, layout, memory, step))
        seen.append(flat)
    return seen


def steps_of(rank, layout, num_steps, dtype=torch.float32):
    return [draw(100 * rank + step, layout.numel)[0].to(dtype) for step in range(num_steps)]


@pytest.mark.parametrize("num_rounds", [1, 2])
@pytest.mark.parametrize("world_size", [3, 5])
def test_messages_that_go_in_two_shots_lose_nothing_either(num_rounds, world_size):
    layout = layout_of((900, 800), (50,), (700, 900))  # too many values for one shot
    exchange = LowRank(8, num_rounds=num_rounds)
    assert not one_round_pays(4 * exchange.plan(layout).left.numel, world_size)

    def job(group):
        memory, steps = Memory(), steps_of(group.rank, layout, 3)
        seen = run_steps(group, exchange, layout, steps, memory)
        residuals = [memory.named()["residual"].get(slot.name) for slot in layout.slots]
        kept = torch.cat([torch.zeros(50) if r is None else r.flatten() for r in residuals])
        return sum(seen), sum(steps), kept

    results = run_virtual_ranks(job, world_size)
    sent, given, kept = (torch.stack(values) for values in zip(*results, strict=True))
    assert (sent == sent[0]).all(), "the same bits on every rank"
    assert torch.allclose(sent[0] + kept.mean(0), given.mean(0), atol=1e-4)


def test_what_is_not_encoded_travels_with_the_first_factor():
    layout = layout_of((900, 800), (50,), (700, 900))
    for rounds, world_size, spec in ((2, 2, "powersgd:rank=4"), (4, 2, "powersgd"), (4, 8, "powersgd")):
        assert gradwire.recipe(spec).exchange.link_rounds(layout, world_size, 0).across == rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_held_back_is_released_on_one_rank_and_where_nothing_is_compressed(dtype):
    layout = layout_of((30, 20), (20,), dtype=dtype)
    for world_size, held in ((1, ("p0", "p1")), (2, ("p1",))):

        def job(group, held=held):
            memory = Memory()
            shapes = {slot.name: slot.shape for slot in layout.slots}
            memory.load({"residual": {name: torch.ones(shapes[name], dtype=dtype) for name in held}})
            (flat,) = run_steps(group, LowRank(1), layout, [torch.zeros(620, dtype=dtype)], memory)
            return flat, set(memory.named().get("residual", ()))

        for flat, names in run_virtual_ranks(job, world_size):
            assert (flat[600:] == 1).all()
            assert (flat[:600] == (1 if "p0" in held else 0)).all()
            assert names == (set() if world_size == 1 else {"p0"})


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_steady_state_allocates_no_tensors(num_rounds):
    layout = layout_of((600, 500), (500,), (500, 600))
    exchange = LowRank(4, num_rounds=num_rounds)

    def job(group):
        memory, scratch, largest = Memory(), Scratch(), []
        (flat,) = draw(group.rank, layout.numel)
        for step in range(5):
            context = Context(group, scratch, 0.5, layout, memory, step)
            with largest_allocation() as found:
                average(flat, exchange, context)
            largest.append(found)
        return largest

    for largest in run_virtual_ranks(job, 2):
        assert largest[0]["bytes"] > layout.numel, "the first step makes what the others use"
        # With one round, the second step is the first to find its side.
        assert [found["bytes"] for found in largest[2:]] == [0] * 3, largest


@contextlib.contextmanager
def largest_allocation():
    """Record the size of the largest new tensor that any op of torch allocates inside."""

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {
                t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
            }
            result = func(*args, **(kwargs or {}))
            for made in tree_leaves(result):
                if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                    found["bytes"] = max(found["bytes"], made.untyped_storage().nbytes())
                    found["op"] = str(func)
            return result

    found = {"bytes": 0}
    with Look():
        yield found


def test_a_plan_is_made_once_however_many_buckets_there_are():
    layouts = [
        BucketLayout(index, torch.float32, (Slot("weight", 0, torch.Size([32, 32]), (32, 1)),))
        for index in range(2000)
    ]
    plans = [plan_of(layout, 2, 2.0, False) for layout in layouts]
    assert all(plan_of(layout, 2, 2.0, False) is plan for layout, plan in zip(layouts, plans, strict=True))


def test_what_is_made_once_for_a_bucket_ends_with_its_layout():
    layout, device = layout_of((64, 64), (7,), (64, 64)), torch.device("cpu")
    plan = plan_of(layout, 4, 2.0, False)
    assert plan is plan_of(layout, 4, 2.0, False)
    assert plan is not plan_of(layout, 2, 2.0, False)
    route = gradwire.recipe("route(p0=fp32; *=int8)").exchange
    parts = route.split(layout)
    assert parts is route.split(layout)
    made = [plan, parts[0][1], parts[1][1], _sizes(layout, device), plan_of(layout, 4, 2.0, True)]
    if cuda is not None:
        made += [cuda._tiles(plan.batches, device), cuda._matrices(plan.batches, "left", 0, device)]
    ends = [weakref.ref(each) for each in made]
    del layout, plan, parts, made
    gc.collect()
    assert [end() for end in ends] == [None] * len(ends)


def test_a_layout_that_is_made_again_in_every_step_takes_no_more_memory():
    layout, exchange = layout_of((64, 64), (64, 64)), LowRank(2)

    def job(group):
        memory, sizes = Memory(), []
        for step, given in enumerate(steps_of(group.rank, layout, 4)):
            run_steps(group, exchange, replace(layout), [given], memory, first_step=step)
            sizes.append(len(memory._cache))
        return sizes

    assert run_virtual_ranks(job, 2) == [[1] * 4] * 2
