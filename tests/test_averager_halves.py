"""`Averager.reduce_scatter` and `Averager.all_gather`: chunks of means, by every recipe of values."""

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.exchanges import even_bounds
from tests.averaged import require_identical

# Each with the largest error of one rounding, relative to the largest value.
TOLERANCES = {
    "fp32": 1e-6,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
    "int8": 1.01 / 254,
    "fp8": 2.0**-4,
    "int4": 1.01 / 14,
    "int4:rounding=stochastic": 1.01 / 7,
    "int3": 1.5,
    "int2": 3.0,
    "sign": 1.0,
}
LENGTHS = (1, 63, 1024, 4099, 70_001)


def draw(rank, numel, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def mean(numel, dtype=torch.float32):
    world = dist.get_world_size()
    return sum(draw(rank, numel, dtype).double() for rank in range(world)) / world


def check_halves(rank, spec, tolerance, dtype=torch.float32):
    world = dist.get_world_size()
    with gradwire.Averager(spec) as averager:
        for numel in LENGTHS:
            flat = draw(rank, numel, dtype)
            shard = averager.reduce_scatter(flat)
            start, end = even_bounds(numel, world)[rank]
            want, largest = mean(numel, dtype), max(float(draw(r, numel).abs().max()) for r in range(world))
            own_rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
            assert (shard.dtype, shard.shape) == (dtype, (end - start,))
            if len(shard):
                error = (shard.double() - want[start:end]).abs().max()
                assert error <= (tolerance + own_rounding) * largest, (numel, float(error))
            if len(shard) > 500:
                assert (shard.double() - want[start:end]).norm() < 0.9 * want[start:end].norm(), "not zeros"
            full = averager.all_gather(shard, numel=numel)
            require_identical({"full": full})
            assert (full.dtype, full.shape) == (dtype, flat.shape)
            error = (full[start:end].double() - shard.double()).abs().max() if len(shard) else 0.0
            assert error <= (tolerance + own_rounding) * largest, (numel, float(error))
            if len(shard) > 500:
                assert (full[start:end] - shard).norm() < 0.9 * shard.norm(), "not zeros"
        assert averager.stats().num_steps == 2 * len(LENGTHS)


@pytest.mark.parametrize("spec", TOLERANCES)
def test_two_ranks_have_their_chunks_of_the_mean(spec, two_ranks):
    two_ranks.run(check_halves, spec, TOLERANCES[spec])


@pytest.mark.parametrize(
    "spec", ["int4", *(pytest.param(spec, marks=pytest.mark.full) for spec in ("fp32", "bf16", "sign"))]
)
def test_three_ranks_have_their_chunks_of_the_mean(spec, three_ranks):
    three_ranks.run(check_halves, spec, TOLERANCES[spec])


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("spec", ["fp32", "bf16", "int8"])
def test_chunks_of_other_dtypes_are_summed_in_fp32(spec, dtype, two_ranks):
    two_ranks.run(check_halves, spec, TOLERANCES[spec], dtype)


def check_bytes(rank):
    """A reduce-scatter sends each other rank its chunk, once."""
    for spec, num_bytes in {
        "fp32": 4 * 1024,
        "bf16": 2 * 1024,
        "int8": 1024 + 2 * 4,
        "int4": 512 + 2 * 8,
    }.items():
        with gradwire.Averager(spec) as averager:
            averager.reduce_scatter(torch.ones(2048))
            assert averager.stats().bytes_sent == num_bytes + 24, spec  # and a claim of 24 bytes
            averager.all_gather(torch.ones(1024))
            assert averager.stats().bytes_sent == 2 * (num_bytes + 24), spec


def test_a_reduce_scatter_sends_half_of_an_average(two_ranks):
    two_ranks.run(check_bytes)


def check_sum_and_exact(rank):
    with gradwire.Averager("int4:reduction=sum") as averager:
        # Sums are not encoded again: two values that int4 can send add up to one that it cannot.
        flat = torch.zeros(256)
        flat[:2] = torch.tensor([7.0, 1.0 + rank])
        flat[128:130] = torch.tensor([7.0, 1.0 + rank])
        shard = averager.reduce_scatter(flat)
        assert shard[:2].tolist() == [14.0, 3.0]


def test_sums_are_not_encoded_again(two_ranks):
    two_ranks.run(check_sum_and_exact)


def check_held_back(rank):
    with gradwire.Averager("int4") as averager:
        want = averager.reduce_scatter(draw(rank, 1000))
        averager.average_({"flat": draw(rank, 1000)})
        held = averager.state_dict()["memory"][f"rank{rank}"]["residual:float32"]["flat"]
        assert held.abs().max() > 0
        assert torch.equal(averager.reduce_scatter(draw(rank, 1000)), want)
        assert torch.equal(averager.state_dict()["memory"][f"rank{rank}"]["residual:float32"]["flat"], held)


def test_what_averages_hold_back_stays_with_its_tensor_whatever_its_name(two_ranks):
    two_ranks.run(check_held_back)


def check_refusals(rank):
    for spec in ("powersgd", "int8:feedback=true", "int4:residual=bf16", "topk"):
        with gradwire.Averager(spec) as averager:
            with pytest.raises(ValueError, match=r"whole matrices|keeps none|would be lost"):
                averager.reduce_scatter(torch.ones(8))
            averager.average_(torch.ones(8))  # which goes on as before
    with gradwire.Averager("int8") as averager, pytest.raises(gradwire.WireError) as caught:
        averager.reduce_scatter(torch.ones(8 + rank))
    assert "8 values, float32 on rank(s) 0" in str(caught.value)
    with gradwire.Averager("int8") as averager, pytest.raises(gradwire.WireError) as caught:
        averager.reduce_scatter(torch.ones(8, dtype=torch.int32) if rank else torch.ones(8))
    assert "torch.int32" in str(caught.value)
    with gradwire.Averager("int8") as averager, pytest.raises(gradwire.WireError, match="its chunk of 9 has"):
        averager.all_gather(torch.ones(7), numel=9)
    with gradwire.Averager("int8") as averager, pytest.raises(gradwire.WireError, match="number, not -1"):
        averager.all_gather(torch.ones(7), numel=-1)
    text = r"call is average_ on rank\(s\) 0, reduce_scatter on rank\(s\) 1"
    with gradwire.Averager("int8") as averager, pytest.raises(gradwire.WireError, match=text):
        averager.reduce_scatter(torch.ones(7)) if rank else averager.average_(torch.ones(7))


def test_what_cannot_be_scattered_is_refused_on_every_rank(two_ranks):
    two_ranks.run(check_refusals)


def check_disabled(rank):
    import os

    os.environ["GRADWIRE_DISABLE"] = "1"
    try:
        with gradwire.Averager("int4") as averager:
            shard = averager.reduce_scatter(draw(rank, 7))
            start, end = even_bounds(7, 2)[rank]
            assert torch.allclose(shard.double(), mean(7)[start:end])
            assert torch.allclose(averager.all_gather(shard, numel=7).double(), mean(7))
            large = averager.reduce_scatter(torch.full((4,), 6e4, dtype=torch.float16))
            assert large.tolist() == [6e4, 6e4], "nothing overflows"
    finally:
        del os.environ["GRADWIRE_DISABLE"]


def test_torch_scatters_when_gradwire_is_disabled(two_ranks):
    two_ranks.run(check_disabled)
