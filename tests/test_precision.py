"""Gradients of every size, dtype and layout are averaged, and none is lost on the way."""

import copy
import functools
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.buckets import BucketLayout, Memory, Slot
from gradwire.exchanges import Context, Scratch, average
from gradwire.peers import gather_rows
from gradwire.testing import run_ranks, run_virtual_ranks
from tests.torch_versions import needs_gloo_of_bf16


def mean_of(local, group=None):
    total = local.double()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def job_large_and_small(rank, recipe):
    net = nn.Linear(1, 2, bias=False)
    model = DistributedDataParallel(net)
    gradwire.attach(model, recipe)
    # d loss / d weight is the input times the factor.
    large = 80000.0 if rank == 0 else 0.0
    (model(torch.ones(1, 1)) * torch.tensor([large, 1e-7])).sum().backward()
    world_size = dist.get_world_size()
    assert net.weight.grad[0].item() == pytest.approx(80000 / world_size, rel=2**-7)
    if recipe != "fp16":  # beside 80000, 1e-7 is below what one scale can hold
        assert net.weight.grad[1].item() == pytest.approx(1e-7, rel=2**-7)
    model.zero_grad()
    (model(torch.ones(1, 1)) * torch.tensor([1e-7, 3e38])).sum().backward()
    assert net.weight.grad[1].item() == pytest.approx(3e38, rel=2**-7)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("recipe", ["fp32", "fp16", "bf16"])
def test_a_mean_that_fits_is_never_lost(recipe, world_size):
    run_ranks(job_large_and_small, world_size, args=(recipe,))


def job_large_sum(rank):
    net = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(net)
    gradwire.attach(model, "fp16:reduction=sum")
    (model(torch.ones(1, 1)) * (1.8e38 if rank else 1e38)).sum().backward()
    assert net.weight.grad.item() == pytest.approx(2.8e38, rel=2**-10)


def test_a_sum_that_fits_is_never_lost():
    run_ranks(job_large_sum, 2)


def job_tiny(rank):
    for recipe in ("fp16", "bf16"):
        net = nn.Linear(1, 1, bias=False)
        model = DistributedDataParallel(net)
        gradwire.attach(model, recipe)
        (model(torch.ones(1, 1)) * 1e-7).sum().backward()
        assert net.weight.grad.item() == pytest.approx(1e-7, rel=2**-7)


def test_tiny_gradients_survive_on_eight_ranks():
    run_ranks(job_tiny, 8)


CUTS = (0, 4, 50, 97, 300)


def values_of(rank, dtype):
    return torch.randn(300, generator=torch.Generator().manual_seed(rank)).to(dtype)


def averaged_in_parts(recipe, dtype, cuts, world_size=3, wrap=lambda group: group):
    """Return the average of 300 values in buckets that end at ``cuts``."""

    def job(group):
        group = wrap(group)
        values = values_of(group.rank, dtype)
        for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
            layout = BucketLayout.packed(index, dtype, [Slot("p", 0, torch.Size([end - begin]), (1,))])
            context = Context(group, Scratch(), 1 / group.size, layout, Memory(), 0)
            average(values[begin:end], gradwire.recipe(recipe).exchange, context)
        return values

    return run_virtual_ranks(job, world_size)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exact_averages_do_not_depend_on_where_buckets_are_cut(dtype):
    whole, cut = (averaged_in_parts("fp32", dtype, cuts) for cuts in ((0, 300), CUTS))
    assert whole.any()
    assert torch.equal(cut, whole)


@pytest.mark.parametrize(("recipe", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_owner_adds_its_own_values_without_rounding_them(recipe, dtype):
    whole, cut = (averaged_in_parts(recipe, torch.float32, cuts) for cuts in ((0, 300), CUTS))
    exact = averaged_in_parts("fp32", torch.float32, CUTS)
    assert not torch.equal(cut, whole), "other ranks own the values"
    for average_ in (cut, whole):
        assert (average_ - exact).abs().max() < 3 * torch.finfo(dtype).eps


class Summing:
    """A group with a sum of its own, which adds in the dtype of the values, as NCCL does."""

    native_gather = None

    def __init__(self, group, dtypes=None):
        self.rank, self.size, self.post = group.rank, group.size, group.post
        self.dtypes = [] if dtypes is None else dtypes

    def native_sum(self, values):
        self.dtypes.append(values.dtype)
        first, *others = gather_rows(values, self)
        for other in others:
            first += other
        values.copy_(first)


@pytest.mark.parametrize(
    ("recipe", "dtype", "world_size", "summed_in"),
    [
        ("fp32", torch.float32, 3, torch.float32),
        ("fp32", torch.bfloat16, 2, torch.bfloat16),
        ("fp16", torch.float16, 2, torch.float16),
        ("bf16", torch.float32, 2, torch.bfloat16),
        ("bf16", torch.float64, 2, torch.bfloat16),
        ("bf16", torch.float32, 3, None),  # NCCL would round twice
        ("fp32", torch.bfloat16, 3, None),
        ("fp16", torch.float32, 2, None),  # messages have scales
        ("int8", torch.float32, 2, None),
    ],
)
def test_a_backend_sums_what_it_rounds_as_often_as_we_do(recipe, dtype, world_size, summed_in):
    dtypes = []
    averaged_in_parts(recipe, dtype, (0, 300), world_size, functools.partial(Summing, dtypes=dtypes))
    assert dtypes == ([] if summed_in is None else [summed_in] * world_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_backends_sum_of_two_16_bit_buckets_has_the_same_bits(dtype):
    by_us, by_backend = (averaged_in_parts("fp32", dtype, CUTS, 2, wrap) for wrap in (lambda g: g, Summing))
    assert by_us.any()
    assert torch.equal(by_us, by_backend)


def test_a_backend_gets_values_that_are_scaled_before_they_are_rounded():
    averaged = averaged_in_parts("bf16", torch.float32, CUTS, 2, Summing)
    first, second = (values_of(rank, torch.float32).div(2).bfloat16() for rank in range(2))
    assert torch.equal(averaged, (first + second).float())


def test_a_mean_that_fits_is_not_lost_in_a_backends_sum():
    def job(group):
        flat = torch.tensor([3e38, 1e-30, float("inf")])
        layout = BucketLayout.packed(0, flat.dtype, [Slot("p", 0, flat.shape, (1,))])
        return average(
            flat, gradwire.recipe("bf16").exchange, Context(Summing(group), Scratch(), 0.5, layout)
        )

    for averaged in run_virtual_ranks(job, 2):
        assert averaged.tolist() == pytest.approx([3e38, 1e-30, float("inf")], rel=2**-7)


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fp64 = nn.Linear(9, 7).double()
        self.fp32 = nn.Linear(7, 5)
        self.bf16 = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.fp16 = nn.Parameter(torch.randn(5, dtype=torch.float16))
        self.c64 = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x):
        x = self.fp32(self.fp64(x.double()).float())
        return (
            (x * self.bf16.float() * self.fp16.float() * torch.view_as_real(self.c64).sum(1)).square().sum()
        )


TOLERANCES = {"fp32": 2**-8, "fp16": 2**-7, "bf16": 2**-6, "int8:feedback=true": 0.1}


def check_mixed_dtypes(rank, recipe):
    torch.manual_seed(0)
    net = MixedDtypes()
    local = copy.deepcopy(net)
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    with gradwire.attach(model, recipe):
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(4, 9)
            model.zero_grad()
            local.zero_grad()
            model(x).backward()
            local(x).backward()
            for (name, p), q in zip(net.named_parameters(), local.parameters(), strict=True):
                assert p.grad.dtype == p.dtype
                have, want = (torch.view_as_real(g) if g.is_complex() else g for g in (p.grad, q.grad))
                expected = mean_of(want)
                error = (have.double() - expected).abs().max() / expected.abs().max()
                is_exact = recipe == "fp32" and p.dtype.itemsize > 2
                assert error < (1e-6 if is_exact else TOLERANCES[recipe]), name


@needs_gloo_of_bf16
@pytest.mark.parametrize("recipe", TOLERANCES)
def test_buckets_of_every_dtype_are_averaged_in_their_own(recipe, three_ranks):
    three_ranks.run(check_mixed_dtypes, recipe)


class SparseModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 4, sparse=True)
        self.linear = nn.Linear(4, 3)

    def forward(self, indices):
        return self.linear(self.embedding(indices)).square().mean()


def job_sparse_bf16(rank):
    warnings.simplefilter("error")  # DDP on its own has none either
    embedding = nn.Embedding(4, 1, sparse=True, dtype=torch.bfloat16)
    model = DistributedDataParallel(embedding)
    with gradwire.attach(model, "fp32:reduction=sum"):
        model(torch.tensor([2])).sum().mul(256.0 if rank == 0 else 1.0).backward()
    # One by one, in bf16, the ones would be lost beside 256.
    assert embedding.weight.grad.to_dense()[2].item() == 260


def test_sparse_16_bit_gradients_are_summed_in_fp32_without_a_warning():
    run_ranks(job_sparse_bf16, 4)


def job_sparse(rank, recipe):
    torch.manual_seed(0)
    net = SparseModel()
    local = copy.deepcopy(net)
    model = DistributedDataParallel(net)
    with gradwire.attach(model, recipe):
        for step in range(4):
            # Different rows on each rank, one of them twice, and on rank 0 sometimes one alone.
            indices = torch.tensor([rank, rank, 7, 10 * rank + step][: 1 if rank == 0 and step == 2 else 4])
            model.zero_grad()
            local.zero_grad()
            model(indices).backward()
            local(indices).backward()
            grad = net.embedding.weight.grad
            assert grad.is_sparse
            expected = mean_of(local.embedding.weight.grad.to_dense())
            assert torch.allclose(grad.to_dense().double(), expected, rtol=1e-5, atol=1e-9)
            everyone = [torch.empty(50, 4) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, grad.to_dense())
            assert all(torch.equal(other, everyone[0]) for other in everyone)
            expected = mean_of(local.linear.weight.grad)
            assert torch.allclose(net.linear.weight.grad.double(), expected, rtol=2**-6, atol=1e-4)


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_sparse_gradients_are_averaged(recipe):
    run_ranks(job_sparse, 3, args=(recipe,))
