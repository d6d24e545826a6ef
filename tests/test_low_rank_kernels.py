"""Kernels of low rank: fast ones equal the reference, and extreme values survive."""

import math

import numpy as np
import pytest
import torch

from gradwire.exchanges.matrices import plan_of
from gradwire.ops.batches import Batch, Batches, Matrix
from gradwire.ops.cpu import low_rank as cpu
from gradwire.ops.cpu import many_vectors, orthogonal
from gradwire.ops.reference import low_rank as reference
from tests.drawn_buckets import draw, layout_of

try:
    from gradwire.ops.cuda import low_rank as cuda
except ImportError:  # no Triton for this platform
    cuda = None

# Vectors, one value, wide, tall, odd, and two of a kind: matrices of several shapes in one bucket.
SHAPES = [(7, 40), (33, 65), (), (7, 40), (40, 7), (1, 1), (3,), (64, 64), (130, 31), (20, 20), (7, 40)]
KERNELS = [(cpu, torch.float32), (reference, torch.float32), (reference, torch.float64)]
if cuda is not None:
    KERNELS.append((cuda, torch.float32))  # in Triton's interpreter
FAST = [module for module in (cpu, cuda) if module is not None]


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


@pytest.mark.parametrize("module", FAST, ids=str)
@pytest.mark.parametrize("place", [0, 1500, 2699])
def test_a_value_that_is_not_finite_is_found_anywhere_in_a_long_factor(module, place):
    plan = plan_of(layout_of((300, 300), (300, 300)), 9, 0, False)
    (factor,) = draw(6, 2 * 2700)
    factor[2700 + place] = -math.inf
    votes, kept = torch.ones(2), torch.zeros_like(factor)
    module.judge(plan.batches, "right", factor, votes, kept)
    assert votes[0] == 1
    assert votes[1].isnan()
    assert torch.equal(kept[:2700], factor[:2700])
    assert not kept[2700:].any()


def expand(plan, side, flags):
    """Repeat each matrix's flag for every value of its factor."""
    out = torch.empty(plan.left.numel if side == "left" else plan.right.numel, dtype=torch.bool)
    for batch in plan.batches:
        batch.factors(side, out).copy_(batch.each(flags).view(-1, 1, 1))
    return out


@pytest.mark.skipif(cuda is None, reason="needs Triton")
def test_half_precision_buckets_go_through_the_same_kernels():
    plan = plan_of(layout_of((33, 65), (40, 7), dtype=torch.bfloat16), 2, 0, False)
    flat = draw(3, 33 * 65 + 280)[0].bfloat16()
    fast, slow = all_kernels(cuda, plan, flat), all_kernels(reference, plan, flat)
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
    many_vectors.finish(left, right, left, own, matrix, True, values, False)
    assert np.array_equal(back, again)
    close = {"rtol": 0, "atol": 2e-6 * max(rows, columns, rank)}
    np.testing.assert_allclose(found, right @ total.T, **close)
    np.testing.assert_allclose(back, left @ total, **close)
    np.testing.assert_allclose(values, left.T.astype(np.float64) @ right, **close)
    np.testing.assert_allclose(matrix, total - left.T.astype(np.float64) @ own, **close)


def test_a_number_of_a_product_has_the_same_bits_wherever_it_lies():
    left, right = (each.numpy() for each in draw(7, (20, 77), (20, 131)))
    whole = np.empty((77, 131), np.float32)
    many_vectors.finish(left, right, left, right, whole, False, whole, False)
    for rows, columns in (
        (slice(0, 1), slice(3, 4)),
        (slice(5, 50), slice(17, 131)),
        (slice(9, 77), slice(1, 36)),
    ):
        p, q = np.ascontiguousarray(left[:, rows]), np.ascontiguousarray(right[:, columns])
        part = np.empty((p.shape[1], q.shape[1]), np.float32)
        many_vectors.finish(p, q, p, q, part, False, part, False)
        assert np.array_equal(part, whole[rows, columns])


@pytest.mark.parametrize("rank", [3, 20, 32])
@pytest.mark.parametrize("columns", [64, 80, 67])
@pytest.mark.parametrize("shift", [0, 5])
def test_a_product_that_goes_past_the_caches_has_the_same_bits(rank, columns, shift):
    left, right = (each.numpy() for each in draw(8, (rank, 45), (rank, columns)))
    wanted, found = (torch.zeros(45 * columns + shift)[shift:].view(45, columns).numpy() for _ in range(2))
    many_vectors.finish(left, right, left, right, wanted, False, wanted, False)
    many_vectors.finish(left, right, left, right, found, False, found, True)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("rank", [5, 20, 40])
@pytest.mark.parametrize("poison", [math.nan, -math.inf, 1.0])
def test_gradients_are_added_and_judged_in_every_row(rank, poison):
    for row in range(35):
        values, matrix, right = (each.numpy() for each in draw(9, (35, 300), (35, 300), (rank, 300)))
        values[:] = 0
        values[row, row * 8] = poison
        total = matrix.copy()
        total[row, row * 8] += np.nan_to_num(poison, posinf=0.0, neginf=0.0)
        verdict = many_vectors.accumulate_and_project(values, matrix, right, np.empty((rank, 35), np.float32))
        assert verdict == 1 if math.isfinite(poison) else math.isnan(verdict)
        assert np.array_equal(matrix, total)


def test_sums_that_the_system_takes_back_when_they_are_freed_are_not_freed_too_early():
    # More than 32 MiB: malloc keeps less for later.
    values, right = (each.numpy() for each in draw(10, (600_000, 4), (5, 4)))
    found = np.empty((5, 600_000), np.float32)
    assert many_vectors.accumulate_and_project(values, np.zeros_like(values), right, found) == 1
    np.testing.assert_allclose(found, right @ values.T, rtol=0, atol=1e-5)


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
@pytest.mark.parametrize("angle", [1.0, 0.1, 1e-4, 0.0])
def test_triton_makes_vectors_orthogonal_in_order_however_much_alike_they_are(angle):
    vectors, directions, spare = draw(8, (12, 301), (12, 301), (12, 301))
    vectors *= 10.0 ** (3 * torch.arange(12.0) - 20)[:, None]
    vectors[5] = vectors[4] + angle * vectors[4].norm() * directions[5]
    found, given = vectors.clone(), vectors.double()
    one_factor(cuda, found, spare)
    torch.testing.assert_close(found @ found.T, torch.eye(12), rtol=0, atol=3e-6)
    scaled = given / given.norm(dim=1, keepdim=True)
    if angle:
        torch.testing.assert_close(scaled @ found.double().T @ found.double(), scaled, rtol=0, atol=1e-5)
    assert ((scaled @ found.double().T).tril() - scaled @ found.double().T).abs().max() < 1e-5


@pytest.mark.skipif(cuda is None, reason="needs Triton")
def test_a_table_of_matrices_is_made_in_host_memory_whatever_the_default_device():
    with torch.device("meta"):
        table = cuda._on(torch.device("cpu"), [(1, 2), (3, 4)])
    assert table.tolist() == [[1, 2], [3, 4]]
