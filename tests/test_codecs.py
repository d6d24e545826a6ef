"""Laws that every codec keeps, over sizes, dtypes and values."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradwire import ops
from gradwire.codecs import Affine, Blocks, Cast, Raw, Rotated, Top
from gradwire.exchanges import TwoShot
from gradwire.ops import NO_RANK, Chunk, Seed, Terms
from gradwire.ops.cpu import casts as cpu
from gradwire.ops.cpu.vectors import STREAMED
from gradwire.ops.reference import casts as reference
from tests.rows import ROWS

try:
    from gradwire.ops.cuda import casts as cuda
except ImportError:  # no Triton for this platform
    cuda = None

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CODEC_ROWS = [row for row in ROWS if isinstance(row.exchange, TwoShot) and row.expect == "mean"]
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([4095, 4096, 4097, 65537, 140001]))


def draw_values(n, dtype, seed, magnitude):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=generator, dtype=torch.float64) * magnitude).to(dtype)


def round_trip(codec, values):
    row = torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8)
    decoded = torch.full_like(values, math.nan)
    if values.numel():
        # As an exchange does for a codec that works in one dtype only.
        wide = values if codec.works_in is None else values.to(codec.works_in)
        codec.encode(Chunk(wide, row, None, Seed(1, 2)))
        wide = torch.full_like(wide, math.nan)
        codec.decode(row, wide, Seed(1, 2))
        decoded.copy_(wide)
    return decoded


@pytest.mark.parametrize("row", CODEC_ROWS, ids=lambda row: row.spec)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=25)
@given(n=SIZES, seed=st.integers(0, 2**16), exponent=st.sampled_from([-30, -8, 0, 3, 30]))
@example(n=1, seed=0, exponent=0)
def test_what_is_decoded_is_within_the_promised_error(row, dtype, n, seed, exponent):
    largest = {torch.float16: 4, torch.bfloat16: 30, torch.float32: 30, torch.float64: 30}[dtype]
    values = draw_values(n, dtype, seed, 10.0 ** min(exponent, largest))
    codec = row.exchange.codec.resolve(dtype)
    assert codec.wire_bytes(n) == row.exact_bytes(n, dtype)
    decoded = round_trip(codec, values)
    assert (decoded.shape, decoded.dtype, decoded.device) == (values.shape, dtype, values.device)
    if n:
        error = (decoded.double() - values.double()).abs().max() / values.double().abs().max().clamp(
            min=1e-300
        )
        # What a bucket of 16 bits can hold is itself rounded.
        assert error <= min(row.tolerance, codec.max_error) + torch.finfo(dtype).eps
    if n > 500 and values.double().abs().mean() > torch.finfo(dtype).tiny:
        assert (decoded.double() - values.double()).norm() < values.double().norm(), "not zeros"


@pytest.mark.parametrize(
    "codec",
    [
        *(Cast(dtype) for dtype in (torch.float16, torch.bfloat16)),
        *(Blocks(kind, 64, chance) for kind in ("int8", "int4", "fp8") for chance in (False, True)),
        Blocks("sign", 4096),
        Affine(64),
    ],
    ids=str,
)
def test_the_error_that_a_codec_admits_is_one_that_it_comes_close_to(codec):
    # One large value in each block, of another size each time, and many that lie anywhere below it.
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(512, 64, generator=generator) * 2 - 1
    values[:, 0] = 1 + torch.rand(512, generator=generator)
    values[:, 1] = -values[:, 0]
    if codec == Blocks("sign", 4096):
        values *= 1e-3
        values[::64, 0] = 1
    decoded = round_trip(codec.resolve(torch.float32), values.view(-1)).view_as(values)
    shared = codec.block if isinstance(codec, Blocks) else values[0].numel()
    off = (decoded - values).abs().view(-1, shared)
    within = values.abs() if isinstance(codec, Cast) else values.abs().view(-1, shared).amax(1, keepdim=True)
    worst = float((off / within).max())
    assert 0.9 * codec.max_error < worst <= codec.max_error * (1 + 1e-4)  # in fp32


@pytest.mark.parametrize("row", CODEC_ROWS, ids=lambda row: row.spec)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_come_back_as_zeros(row, dtype):
    decoded = round_trip(row.exchange.codec.resolve(dtype), torch.zeros(1000, dtype=dtype))
    assert torch.equal(decoded, torch.zeros(1000, dtype=dtype))


@pytest.mark.parametrize("row", CODEC_ROWS, ids=lambda row: row.spec)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so_and_spares_the_rest(row, poison):
    values = torch.linspace(-1, 1, 10000)
    values[17] = poison
    codec = row.exchange.codec.resolve(torch.float32)
    decoded = round_trip(codec, values)
    if isinstance(codec, Blocks | Rotated | Top):  # the values that share its scale are not finite either
        assert not decoded[: codec.block].isfinite().any()
        others = torch.arange(10000) >= codec.block
    else:
        assert decoded[17].isnan() if math.isnan(poison) else decoded[17] == poison
        others = torch.arange(10000) != 17
    assert torch.allclose(decoded[others], values[others], atol=row.tolerance)


@pytest.mark.parametrize("value", [80000.0, 3e38, 1e-7, 1e-30, 2.0**-126, -65504.0, 65520.0])
def test_fp16_carries_values_outside_its_own_range(value):
    decoded = round_trip(Cast(torch.float16), torch.tensor([value, 0.0]))
    assert decoded[0] == pytest.approx(value, rel=2.0**-11)
    assert decoded[1] == 0


def test_a_bucket_no_wider_than_the_cast_travels_as_it_is():
    assert Cast(torch.float16).resolve(torch.bfloat16) == Raw(torch.bfloat16)
    assert Cast(torch.bfloat16).resolve(torch.bfloat16) == Raw(torch.bfloat16)
    assert Cast(torch.bfloat16).resolve(torch.float64) == Cast(torch.bfloat16)


@pytest.mark.parametrize("block", [None, 1, 512])
@settings(max_examples=25)
@given(
    n=SIZES.filter(bool),
    seed=st.integers(0, 2**16),
    exponent=st.sampled_from([-30, 0, 30]),
    shift=st.sampled_from([-5.0, 0.0, 5.0]),
)
def test_affine_codes_are_within_half_a_step_of_the_range(block, n, seed, exponent, shift):
    values = draw_values(n, torch.float32, seed, 1.0).add(shift) * 10.0**exponent
    codec = Affine(block)
    num_ranges = 1 if block is None else -(-n // block)
    assert codec.wire_bytes(n) == -(-n // 4) * 4 + 8 * num_ranges
    decoded = round_trip(codec, values)
    width = values.clamp(min=0).max() - values.clamp(max=0).min()
    # The code of zero is rounded too, so a value may be off by half a step more at the end of a range.
    assert (decoded - values).abs().max() <= width / 255 * (1 + 1e-5)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_affine_blocks_that_are_not_finite_come_back_so_and_spare_the_rest(poison):
    values = torch.linspace(-1, 1, 1000)
    values[17] = poison
    decoded = round_trip(Affine(100), values)
    assert not decoded[:100].isfinite().any()
    assert torch.allclose(decoded[100:], values[100:], atol=1 / 255)
    assert torch.equal(round_trip(Affine(), torch.zeros(9)), torch.zeros(9))


def test_a_cast_to_anything_but_16_bits_is_refused():
    with pytest.raises(ValueError, match="float16 or torch.bfloat16, not torch.int8"):
        Cast(torch.int8)


# --- the kernels equal the reference, bit for bit ---


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=60)
@given(
    n=SIZES.filter(bool),
    num_rows=st.integers(2, 5),
    row_dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    scale=st.sampled_from([0.5, 1.0, 1 / 3, 0.2]),
    all_alike=st.booleans(),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_the_reduce_kernel_equals_the_reference(n, num_rows, row_dtype, scale, all_alike, seed, data):
    own_index = data.draw(st.integers(0, num_rows - 1))
    header = 4 if row_dtype == torch.float16 else 0
    stride = -(-(header + n * row_dtype.itemsize) // 64) * 64
    rows = torch.zeros(num_rows, 64 + stride, dtype=torch.uint8)[:, 64:]  # other segments share the message
    for r in range(num_rows):
        values = draw_values(n, row_dtype, seed + r, 3.0)
        rows[r, header : header + n * row_dtype.itemsize] = values.view(torch.uint8)
    up, down = (4.0, 0.25) if row_dtype == torch.float16 else (1.0, 1.0)

    def reduced(kernels, scales, up, down):
        own = draw_values(n, torch.float32, seed + own_index, 3.0)
        encoded = own if row_dtype == torch.float32 else torch.zeros(n, dtype=row_dtype)
        kernels.reduce_rows(Terms(own, own_index, rows, scales, header), encoded, up, down)
        return torch.cat([own.view(torch.uint8), encoded.view(torch.uint8)])

    scales = [scale if all_alike else scale / (1 + r) for r in range(num_rows)]
    want = reduced(reference, scales, up, down)
    assert torch.equal(want, reduced(cpu, scales, up, down))
    # To bf16, Triton's interpreter does not round as devices do.
    if cuda is not None and row_dtype != torch.bfloat16:
        assert torch.equal(want, reduced(cuda, scales, up, down))
        on_device = [torch.tensor(each) if r else each for r, each in enumerate(scales)]
        given = on_device, torch.tensor(up), torch.tensor(down)
        assert torch.equal(reduced(reference, *given), reduced(cuda, *given))


def sums_of(kernels, n, num_rows, own_index, own_dtype, row_dtype, scales):
    """Return the sum of rows and own values, by some kernels."""
    header = 4 if row_dtype == torch.float16 else 0
    stride = -(-(header + n * row_dtype.itemsize) // 64) * 64
    rows = torch.zeros(num_rows, 64 + stride, dtype=torch.uint8)[:, 64:]
    for r in range(num_rows):
        values = draw_values(n, row_dtype, r, 3.0)
        rows[r, header : header + n * row_dtype.itemsize] = values.view(torch.uint8)
    own = draw_values(n, own_dtype, own_index, 3.0)
    kernels.sum_rows(Terms(own, own_index, rows, scales, header), row_dtype)
    return own


@pytest.mark.parametrize("row_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [2, 3])
def test_sums_that_are_not_encoded_equal_the_reference(num_rows, row_dtype):
    for n in (1, 63, 4097):
        for own_index in (*range(num_rows), NO_RANK):
            args = n, num_rows, own_index, torch.float32, row_dtype, [1 / num_rows] * num_rows
            want = sums_of(reference, *args)
            terms = [draw_values(n, row_dtype, r, 3.0).float() for r in range(num_rows)]
            if own_index != NO_RANK:
                terms[own_index] = draw_values(n, torch.float32, own_index, 3.0)
            assert torch.allclose(want, sum(terms) / num_rows, atol=1e-5)
            assert same_bits(want, sums_of(cpu, *args))
            if cuda is None:
                continue
            assert same_bits(want, sums_of(cuda, *args))
            scales = [torch.tensor(1 / num_rows) if r else 1 / num_rows for r in range(num_rows)]
            halves = n, num_rows, own_index, row_dtype, row_dtype, scales
            if row_dtype != torch.bfloat16:  # to which Triton's interpreter does not round as devices do
                assert same_bits(sums_of(reference, *halves), sums_of(cuda, *halves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@settings(max_examples=40)
@given(n=SIZES.filter(bool), seed=st.integers(0, 2**16), scale=st.sampled_from([1.0, 2.0**15, 2.0**-20]))
def test_the_casts_equal_the_reference(dtype, n, seed, scale):
    values = draw_values(n, torch.float32, seed, 1.0)
    fast, slow = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
    cpu.encode(values, scale, fast)
    reference.cast_scaled(values, scale, slow)
    assert same_bits(fast, slow)
    fast_back, slow_back = torch.empty(n), torch.empty(n)
    cpu.decode(fast, 1 / scale, fast_back)
    reference.cast_scaled(slow, 1 / scale, slow_back)
    assert same_bits(fast_back, slow_back)


@pytest.mark.parametrize("offset", [0, 1, 16], ids="from value {}".format)
@pytest.mark.parametrize("codec", [Cast(torch.bfloat16), Blocks("int8", 64)], ids=str)
def test_many_values_are_decoded_wherever_they_lie(codec, offset):
    n = STREAMED + 5
    values = draw_values(n, torch.float32, 1, 1.0)
    row = torch.empty(codec.wire_bytes(n), dtype=torch.uint8)
    codec.encode(Chunk(values, row))
    # Decoded in pieces too small to be written past the caches.
    expected = torch.cat([round_trip(codec, piece) for piece in values.split(1 << 16)])
    around = torch.full((n + 32,), 7.0)
    codec.decode(row, around[offset : offset + n])
    assert same_bits(around[offset : offset + n], expected)
    assert (around[:offset] == 7).all()
    assert (around[offset + n :] == 7).all()


@pytest.mark.parametrize("values", [[1.0, -3.0], [-0.0], [1e-40, -2e-41], [math.inf, 1.0], [1.0, -math.inf]])
def test_the_absmax_kernel_equals_the_reference(values):
    tensor = torch.tensor(values)
    assert cpu.absmax(tensor) == reference.absmax(tensor) == max(map(abs, values))


def test_absmax_is_not_finite_when_any_value_is_nan():
    tensor = torch.tensor([1.0, math.nan, 2.0])
    assert not cpu.absmax(tensor).isfinite()
    assert not reference.absmax(tensor).isfinite()


def test_the_kernels_are_used_for_fp32_on_cpu(monkeypatch):
    def never(*args):
        raise AssertionError("the reference was used")

    monkeypatch.setattr(reference, "absmax", never)
    monkeypatch.setattr(reference, "cast_scaled", never)
    round_trip(Cast(torch.float16), torch.randn(10))
    with pytest.raises(AssertionError, match="reference"):
        ops.absmax(torch.randn(10, dtype=torch.float64))
