"""Encodings with a scale per block: kernels equal the reference, and extreme values survive."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.codecs import Blocks
from gradwire.ops import NO_RANK, BlockFormat, Chunk, Seed
from gradwire.ops.cpu import blocks as cpu
from gradwire.ops.reference import blocks as reference

try:
    from gradwire.ops.cuda import blocks as cuda
except ImportError:  # no Triton for this platform
    cuda = None

FORMATS = [
    BlockFormat(kind, block, stochastic)
    for kind in ("int8", "int4", "sign", "fp8")
    for block in (32, 128, 4096)
    for stochastic in (False, True)
    if not (kind == "sign" and stochastic)
]
NEAREST = [form for form in FORMATS if not form.stochastic]
SIZES = st.one_of(st.integers(1, 300), st.sampled_from([4095, 4096, 4097, 8191, 8192, 8193, 20001]))
RESIDUALS = [None, torch.float32, torch.bfloat16]


def draw(n, seed, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * torch.randn(n, generator=generator).mul(spread).exp()
    values[seed % n], values[(seed + 1) % n] = 0.0, -0.0
    return values


def same_values(a, b):
    """Equal, where a NaN equals any other."""
    return torch.equal(a.nan_to_num(1e37), b.nan_to_num(1e37)) and torch.equal(a.isnan(), b.isnan())


def same_rows(form, a, b, n):
    (codes_a, scales_a), (codes_b, scales_b) = form.split(a, n), form.split(b, n)
    if scales_a.isnan().any():
        return same_values(scales_a, scales_b)  # the codes of such blocks are undefined
    return torch.equal(codes_a, codes_b) and torch.equal(scales_a, scales_b)


def new_row(form, n):
    return torch.zeros(form.row_bytes(n), dtype=torch.uint8)


def decode(form, row, n):
    values = torch.empty(n)
    reference.decode(form, row, values)
    return values


@pytest.mark.parametrize("form", FORMATS, ids=str)
@settings(max_examples=10)
@given(
    n=SIZES,
    seed=st.integers(0, 2**16),
    residual=st.sampled_from(RESIDUALS),
    poison=st.sampled_from([None, math.inf, math.nan]),
    magnitude=st.sampled_from([1.0, 1e-30, 1e30]),
)
def test_the_kernels_equal_the_reference_bit_for_bit(form, n, seed, residual, poison, magnitude):
    values = draw(n, seed, spread=2.0) * magnitude
    if poison is not None:
        values[n // 2] = poison
    compare(form, cpu, values, residual, magnitude, seed)


@pytest.mark.skipif(cuda is None, reason="there is no Triton for this platform")
@pytest.mark.parametrize("form", [form for form in FORMATS if form.block < 4096], ids=str)
@pytest.mark.parametrize(
    ("residual", "poison"), [(None, None), (torch.float32, math.inf), (torch.bfloat16, None)]
)
def test_the_cuda_kernels_equal_the_reference_in_tritons_interpreter(form, poison, residual):
    for n in (1, 31, 4097):
        values = draw(n, n, spread=2.0)
        if poison is not None:
            values[n // 2] = poison
        compare(form, cuda, values, residual, 1.0, n, scale_steps=int(form.kind == "sign"))


def compare(form, kernels, values, residual, magnitude, seed, scale_steps=0):
    """Encode, decode and reduce, with the kernels and with the reference."""
    n, noise = values.numel(), Seed(seed, 0x9E3779B9)
    results = []
    for module in (reference, kernels):
        row, own_row = new_row(form, n), new_row(form, n)
        kept = None if residual is None else (draw(n, seed + 1) * magnitude / 10).to(residual)
        module.encode(form, Chunk(values, row, kept, noise))
        decoded = torch.empty(n)
        module.decode(form, row, decoded)
        width = -(-form.row_bytes(n) // 64) * 64
        rows = torch.zeros(3, 64 + width, dtype=torch.uint8)[:, 64:]  # other segments share the message
        for r in range(3):
            reference.encode(form, Chunk(draw(n, seed + r) * magnitude, rows[r], None, noise))
        own = values.clone()
        module.reduce(form, Chunk(own, own_row, kept, noise), rows, 1, 1 / 3)
        total, message = values.clone(), rows.clone()
        module.sum_rows(form, total, message, 1, 1 / 3)
        total_of_rows = torch.full_like(values, math.nan)
        module.sum_rows(form, total_of_rows, message, NO_RANK, 1 / 3)
        assert torch.equal(message, rows)  # sums are not encoded
        results.append((row, own_row, decoded, own, kept, total, total_of_rows))
    (row_a, own_row_a, *tensors_a), (row_b, own_row_b, *tensors_b) = results
    if scale_steps == 0:
        assert same_rows(form, row_a, row_b, n)
        assert same_rows(form, own_row_a, own_row_b, n)
    for a, b in zip(tensors_a, tensors_b, strict=True):
        if a is None or scale_steps == 0:
            assert a is b is None or same_values(a, b)
        else:
            # Another order of additions may round a mean to the next bf16 number.
            assert torch.equal(a.isfinite(), b.isfinite())
            difference = (a.float() - b.float()).nan_to_num(0).abs().max()
            assert difference <= scale_steps * 2.0**-7 * a.float().nan_to_num(0).abs().max()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@settings(max_examples=5)
@given(n=SIZES, seed=st.integers(0, 2**16))
def test_what_is_sent_and_what_is_kept_make_up_what_there_was(form, n, seed):
    values, kept = draw(n, seed), draw(n, seed + 1) / 10
    wanted = values.double() + kept.double()
    row = new_row(form, n)
    cpu.encode(form, Chunk(values, row, kept, Seed(seed, 0)))
    sent = decode(form, row, n)
    # One rounding of the sum, one of the difference.
    bound = 2.0**-23 * wanted.abs().max()
    assert (sent.double() + kept.double() - wanted).abs().max() <= bound


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_block_that_is_not_finite_leaves_its_residual_alone(form):
    values, kept = draw(3 * form.block, 1), draw(3 * form.block, 2)
    values[form.block + 5] = math.inf
    before = kept.clone()
    cpu.encode(form, Chunk(values, new_row(form, values.numel()), kept))
    changed = (kept != before).view(3, -1).any(dim=1)
    assert changed.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (form, value)
        for form in NEAREST
        for value in (1e-30, -1e-30, 2.0**-126, 1.0, 3e38, -3e38)
        # The mean of a block of the smallest number and zeros is no number of bf16.
        if not (form.kind == "sign" and value == 2.0**-126)
    ],
    ids=str,
)
def test_the_largest_value_of_a_block_survives_whatever_its_magnitude(form, value):
    values = torch.zeros(form.block)
    values[3] = value
    row = new_row(form, form.block)
    cpu.encode(form, Chunk(values, row))
    decoded = decode(form, row, form.block)[3]
    assert decoded.isfinite()
    assert torch.sign(decoded) == math.copysign(1, value)
    if form.kind != "sign":
        # A step is never below the smallest normal number.
        assert float(decoded) == pytest.approx(value, rel=2.0**-6, abs=2.0**-127)


def test_the_mean_magnitude_of_the_largest_numbers_is_finite():
    form = BlockFormat("sign", 64)
    values = torch.full((64,), torch.finfo(torch.float32).max)
    row = new_row(form, 64)
    cpu.encode(form, Chunk(values, row))
    assert decode(form, row, 64).isfinite().all()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_stochastic_rounding_is_right_on_average_and_repeats_with_its_seed(kind):
    form = BlockFormat(kind, 128, stochastic=True)
    values = draw(128, 3)
    total = torch.zeros(128, dtype=torch.float64)
    rows = []
    for trial in range(400):
        row = new_row(form, 128)
        cpu.encode(form, Chunk(values, row, None, Seed(trial, 5)))
        rows.append(row)
        total += decode(form, row, 128)
    assert len({bytes(row.numpy()) for row in rows}) > 300
    again = new_row(form, 128)
    cpu.encode(form, Chunk(values, again, None, Seed(7, 5)))
    assert torch.equal(again, rows[7])
    largest_step = (
        {"int8": 1 / 127, "int4": 1 / 7, "fp8": 32 / 448}[kind] * values.abs().max() * (1 + 2.0**-7)
    )
    # The mean of 400 roundings is within five deviations, at most half a step each, of the value.
    assert (total / 400 - values).abs().max() <= 5 * largest_step / 2 / math.sqrt(400)


def test_the_codes_are_truly_packed():
    sizes = {kind: Blocks(kind, 256).wire_bytes(256 * 1000) for kind in ("int8", "fp8", "int4", "sign")}
    assert sizes == {"int8": 258_000, "fp8": 258_000, "int4": 130_000, "sign": 34_000}


def test_what_cannot_be_is_refused_when_it_is_made():
    for block in (0, 31, 48, 8192, -256):
        with pytest.raises(ValueError, match=f"power of two from 32 to 4096, not {block}"):
            Blocks("int8", block)
    with pytest.raises(ValueError, match="no encoding 'int3'"):
        Blocks("int3", 128)
    with pytest.raises(ValueError, match="nothing to round"):
        Blocks("sign", 128, stochastic=True)
