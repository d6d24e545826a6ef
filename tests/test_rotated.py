"""Rotated blocks: kernels equal the reference, errors are those of the Gaussian's best levels."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.codecs import Rotated
from gradwire.ops import NO_RANK, Chunk, RotatedFormat, RotatedRows, Seed
from gradwire.ops.cpu import rotated as cpu
from gradwire.ops.reference import rotated as reference

try:
    from gradwire.ops.cuda import rotated as cuda
except ImportError:  # no Triton for this platform
    cuda = None

FORMATS = [
    RotatedFormat(bits, block, unbiased)
    for bits in (1, 2, 3, 4)
    for block in (128, 256, 1024, 4096)
    for unbiased in (False, True)
]
DEFAULTS = [RotatedFormat(bits, 1024, unbiased) for bits in (1, 2, 3, 4) for unbiased in (False, True)]
SIZES = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 4095, 4097, 9001]))
SEED = Seed(0xDEADBEEF, 0x9E3779B9)


def draw(n, seed, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * torch.randn(n, generator=generator).mul(spread).exp()
    values[seed % n] = 0.0
    return values


def new_row(form, n):
    return torch.zeros(form.row_bytes(n), dtype=torch.uint8)


def round_trip(form, values, seed=SEED, kernels=cpu):
    row, decoded = new_row(form, values.numel()), torch.full_like(values, math.nan)
    kernels.encode(form, Chunk(values, row, None, seed))
    kernels.decode(form, row, decoded, seed)
    return decoded


def same_values(a, b):
    return torch.equal(a.nan_to_num(1e37), b.nan_to_num(1e37)) and torch.equal(a.isnan(), b.isnan())


def same_rows(form, a, b, n):
    (codes_a, scales_a), (codes_b, scales_b) = form.split(a, n), form.split(b, n)
    if scales_a.isnan().any():
        return same_values(scales_a, scales_b)  # the codes of such blocks are undefined
    return torch.equal(codes_a, codes_b) and torch.equal(scales_a, scales_b)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@settings(max_examples=8)
@given(
    n=SIZES,
    seed=st.integers(0, 2**16),
    poison=st.sampled_from([None, None, math.inf, math.nan]),
    # Kernels scale blocks whose largest magnitude is outside of 2^-31 to 2^34.
    magnitude=st.sampled_from([1.0, 1e-6, 2.0**-32, 2.0**-31, 2.0**33, 2.0**34, 1e-30, 1e30, 1e-37, 1e-42]),
    spread=st.sampled_from([2.0, 10.0]),
    worker_bits=st.sampled_from([1, 2, 3, 4]),
)
def test_the_kernels_equal_the_reference_bit_for_bit(form, n, seed, poison, magnitude, spread, worker_bits):
    values = draw(n, seed, spread)
    values *= magnitude / values.abs().max().clamp(min=1)
    if poison is not None:
        values[n // 2] = poison
    compare(form, RotatedFormat(worker_bits, form.block, worker_bits == 1), cpu, values, magnitude, seed)


@pytest.mark.skipif(cuda is None, reason="there is no Triton for this platform")
@pytest.mark.parametrize(
    ("form", "worker"),
    [
        (RotatedFormat(2, 1024), RotatedFormat(1, 1024, unbiased=True)),
        (RotatedFormat(1, 128, unbiased=True), RotatedFormat(3, 128)),
        (RotatedFormat(3, 512), RotatedFormat(2, 512, unbiased=True)),
        (RotatedFormat(4, 1024), RotatedFormat(4, 1024)),
        pytest.param(RotatedFormat(1, 4096), RotatedFormat(2, 4096), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize(("over", "magnitude"), [(-1, 1.0), (1, 2.0**-80), (-1, 1e-37)])
def test_the_cuda_kernels_equal_the_reference_in_tritons_interpreter(form, worker, over, magnitude):
    n = form.block + over
    compare(form, worker, cuda, draw(n, n) * magnitude, magnitude, n)


@pytest.mark.skipif(cuda is None, reason="there is no Triton for this platform")
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_the_cuda_kernels_make_a_block_that_is_not_finite_nan(poison):
    values = draw(1300, 1)
    values[7] = poison
    decoded = round_trip(RotatedFormat(2, 1024), values, kernels=cuda)
    assert decoded[:1024].isnan().all()
    assert same_values(decoded, round_trip(RotatedFormat(2, 1024), values))


@pytest.mark.skipif(cuda is None, reason="there is no Triton for this platform")
def test_the_cuda_kernels_make_seeds_of_a_step_that_is_on_the_device():
    form, n = RotatedFormat(2, 1024), 1300
    on_device, known = (Seed(11, 12).of_step(step) for step in (torch.tensor(7), 7))
    rows = torch.zeros(2, -(-form.row_bytes(n) // 64) * 64, dtype=torch.uint8)
    for rank in range(2):
        reference.encode(form, Chunk(draw(n, rank), rows[rank], None, known.of_rank(rank)))
    results = []
    for module, seed in ((reference, known), (cuda, on_device)):
        row, decoded, own, total = new_row(form, n), torch.empty(n), draw(n, 3), torch.empty(n)
        terms = RotatedRows(form, rows, seed)
        module.encode(form, Chunk(draw(n, 0), row, None, seed.of_rank(0)))
        module.decode(form, rows[1, : row.numel()], decoded, seed.of_rank(1))
        module.reduce(form, Chunk(own, row.clone(), None, seed), terms, 0, 0.5)
        module.sum_rows(total, terms, NO_RANK, 0.5)
        results.append((decoded, own, total))
        assert torch.equal(row, rows[0, : row.numel()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def compare(form, worker, kernels, values, magnitude, seed):
    """Encode, decode, reduce and sum, with the kernels and with the reference."""
    n, first = values.numel(), Seed(seed, 0x9E3779B9)
    width = -(-worker.row_bytes(n) // 64) * 64
    rows = torch.zeros(3, 64 + width, dtype=torch.uint8)[:, 64:]  # other segments share the message
    for r in range(3):
        term = draw(n, seed + r) * magnitude
        reference.encode(worker, Chunk(term, rows[r], None, first.of_rank(r)))
    results = []
    for module in (reference, kernels):
        row, own_row, decoded = new_row(form, n), new_row(form, n), torch.empty(n)
        module.encode(form, Chunk(values, row, None, SEED))
        module.decode(form, row, decoded, SEED)
        own, terms = values.clone(), RotatedRows(worker, rows, first)
        module.reduce(form, Chunk(own, own_row, None, SEED), terms, 1, 1 / 3)
        message, total, total_of_rows = rows.clone(), values.clone(), torch.full_like(values, math.nan)
        module.sum_rows(total, terms, 1, 1 / 3)
        module.sum_rows(total_of_rows, terms, NO_RANK, 1 / 3)
        assert torch.equal(message, rows)  # sums are not encoded
        results.append((row, own_row, decoded, own, total, total_of_rows))
    (row_a, own_row_a, *tensors_a), (row_b, own_row_b, *tensors_b) = results
    assert same_rows(form, row_a, row_b, n)
    assert same_rows(form, own_row_a, own_row_b, n)
    for a, b in zip(tensors_a, tensors_b, strict=True):
        assert same_values(a, b)


@pytest.mark.parametrize("form", DEFAULTS, ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0], ids="spread {}".format)
def test_the_error_is_that_of_the_gaussians_best_levels_whatever_the_values(form, spread):
    values = draw(1 << 16, 5, spread)
    error = (round_trip(form, values) - values).norm() / values.norm()
    # Six deviations make up the largest error; a block is not quite Gaussian.
    assert float(error) == pytest.approx(form.max_error / 6, rel=0.05)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_an_unbiased_scale_is_right_on_average_over_seeds(bits):
    form, values = RotatedFormat(bits, 1024, unbiased=True), draw(1024, 3, spread=0.0)
    total = sum(round_trip(form, values, Seed(trial, 1)).double() for trial in range(300))
    deviation = form.max_error / 6 * values.norm() / math.sqrt(300)
    # With 4 bits the scale is the same for all seeds, and so is its rounding to bf16.
    rounding = 0.0 if form.fits_scale else 2.0**-8 * values.norm()
    assert (total / 300 - values).norm() < 1.1 * deviation + rounding
    assert float((total / 300 * values).sum() / values.square().sum()) == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize("form", DEFAULTS, ids=str)
@pytest.mark.parametrize("value", [1e-30, -1e-30, 1.0, 3e38, -3e38])
def test_a_single_value_survives_whatever_its_magnitude(form, value):
    values = torch.zeros(1500)
    values[[3, 1400]] = value
    decoded = round_trip(form, values)
    # All rotated values have one magnitude, so nothing but the scale is rounded. With 4 bits the scale is
    # that of normal values, and the next level is 0.0576 below their deviation.
    off = 2.0**-8 if form.fits_scale else 0.0576 + 2.0**-8 + 0.01 * form.unbiased
    assert torch.allclose(decoded / value, values / value, rtol=0, atol=off)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("exponent", range(-44, -34))
def test_values_too_small_for_a_scale_do_not_come_back_larger(form, exponent):
    values = draw(1500, 2, spread=0.0) * 10.0**exponent
    decoded = round_trip(form, values)
    assert decoded.double().norm() < 2 * values.double().norm()
    if exponent < -38:
        assert not decoded.any()


@pytest.mark.parametrize("form", DEFAULTS, ids=str)
def test_the_largest_numbers_come_back_finite(form):
    assert round_trip(form, torch.full((1024,), torch.finfo(torch.float32).max)).isfinite().all()


@pytest.mark.parametrize("form", DEFAULTS, ids=str)
def test_zeros_come_back_as_zeros_beside_other_blocks(form):
    values = draw(3 * 1024, 1)
    values[1024:2048] = 0
    assert not round_trip(form, values)[1024:2048].any()


def test_only_the_senders_seed_decodes_a_row():
    form, values, row = RotatedFormat(2, 1024), draw(1024, 1, spread=0.0), torch.zeros(258, dtype=torch.uint8)
    decoded = torch.empty(1024)
    cpu.encode(form, Chunk(values, row, None, SEED))
    cpu.decode(form, row, decoded, Seed(SEED.low, SEED.high + 1))
    assert (decoded - values).norm() > values.norm()


def test_the_signs_of_all_values_of_a_row_are_independent():
    index = torch.arange(1 << 15)
    part = next(reference._parts(RotatedFormat(1, 1024), index.numel()))
    signs = 1 - 2 * reference._signs(part, SEED, torch.device("cpu")).view(-1).double()
    for lag in (1, 2, 15, 16, 17, 31, 32, 64, 512, 1024, 8192):
        share = float((signs[lag:] * signs[:-lag]).mean())
        assert abs(share) < 5 / math.sqrt(index.numel() - lag), lag
    assert abs(float(signs.mean())) < 5 / math.sqrt(index.numel())


def mean_of(codec, gradients, seed):
    """Return what an exchange of one chunk would leave: the rows of all ranks but the first, which sums."""
    n, num_ranks, first = gradients[0].numel(), len(gradients), Seed.of(seed)
    worker = codec.to_owner
    rows = torch.zeros(num_ranks, -(-worker.wire_bytes(n) // 64) * 64, dtype=torch.uint8)
    for r in range(1, num_ranks):
        worker.encode(Chunk(gradients[r], rows[r][: worker.wire_bytes(n)], None, first.of_rank(r)))
    own, row = gradients[0].clone(), torch.zeros(codec.wire_bytes(n), dtype=torch.uint8)
    codec.reduce(Chunk(own, row, None, first.of_rank(0)), rows, 0, 1 / num_ranks, first)
    return own


@pytest.mark.parametrize("codec", [Rotated(2, 128), Rotated.of(1, 2, 256), Rotated.of(1, 1)], ids=str)
def test_what_a_row_leaves_out_is_in_the_residual(codec):
    n, first = 1500, Seed.of(3)
    rows = torch.zeros(2, -(-codec.to_owner.wire_bytes(n) // 64) * 64, dtype=torch.uint8)
    values, before = draw(n, 1), draw(n, 2)
    sent, residual, own_residual = torch.empty(n), before.clone(), before.clone()
    codec.to_owner.encode(Chunk(values, rows[1], residual, first.of_rank(1)))
    codec.to_owner.decode(rows[1], sent, first.of_rank(1))
    assert torch.allclose(sent + residual, values + before, rtol=0, atol=1e-5 * float(values.abs().max()))
    assert residual.norm() > 0.2 * sent.norm()
    own, row = values.clone(), new_row(codec.format, n)
    codec.reduce(Chunk(own, row, own_residual, first.of_rank(0)), rows, 0, 0.25, first)
    exact = 0.25 * (values + before + sent)
    assert torch.allclose(own + 0.25 * own_residual, exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
    decoded = torch.empty(n)
    codec.decode(row, decoded, first.of_rank(0))
    assert torch.equal(decoded, own)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("bits", "part"), [((1, 1), 1.0), ((1, 2), 0.88), ((2, 2), 0.84), ((3, 3), 0.95), ((4, 4), 1.0)]
)
def test_a_mean_keeps_its_size(bits, part, num_ranks):
    gradients = [draw(4000, 10 + r, spread=0.5) for r in range(num_ranks)]
    exact = sum(gradients) / num_ranks
    means = [mean_of(Rotated.of(*bits), gradients, seed) for seed in range(20)]
    found = sum(float((mean * exact).sum() / exact.square().sum()) for mean in means) / 20
    assert found == pytest.approx(part, abs=0.05)


def test_the_codes_are_truly_packed_and_tails_are_padded_to_a_power_of_two():
    sizes = [Rotated(bits).wire_bytes(1024 * 1000) for bits in (1, 2, 3, 4)]
    assert sizes == [130_000, 258_000, 386_000, 514_000]
    sizes = {n: Rotated(2).wire_bytes(n) for n in (0, 1, 128, 129, 1000, 1025)}
    assert sizes == {0: 0, 1: 34, 128: 34, 129: 66, 1000: 258, 1025: 292}


def test_what_cannot_be_is_refused_when_it_is_made():
    for block in (0, 64, 1000, 8192):
        with pytest.raises(ValueError, match=f"power of two from 128 to 4096, not {block}"):
            Rotated(2, block)
    for options in ({"bits": 5}, {"worker_bits": 0}, {"worker_bits": 8}):
        with pytest.raises(ValueError, match=f"1, 2, 3 or 4 bits, not {max(options.values())}"):
            Rotated(**options)
