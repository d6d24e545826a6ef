"""The largest values of each block: they come back, and what is left out is kept."""

import math

import pytest
import torch

from gradwire.codecs import Top
from gradwire.ops import Chunk


def encode(codec, values, residual=None):
    row = torch.zeros(codec.wire_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(Chunk(values, row, residual))
    decoded = torch.full_like(values, math.nan)
    codec.decode(row, decoded)
    return decoded


@pytest.mark.parametrize("codec", [Top(), Top(8, 256), Top(64, 4096)], ids=str)
@pytest.mark.parametrize("n", [1, 255, 4096, 10_001])
def test_the_largest_values_of_each_block_come_back_and_the_others_are_kept(codec, n):
    torch.manual_seed(n)
    values, residual = torch.randn(n), torch.randn(n) / 10
    wanted = values + residual
    decoded = encode(codec, values, residual)
    assert torch.equal(residual, wanted - decoded)
    for start in range(0, n, codec.block):
        block, sent = wanted[start : start + codec.block], decoded[start : start + codec.block]
        num_sent = min(codec.keep, len(block))
        least = block.abs().topk(num_sent).values.min()
        assert not sent[block.abs() < least].any()
        # Half of a step of 1/7 of the largest, which is rounded up.
        among = block.abs() >= least
        assert (sent - block)[among].abs().max() <= block.abs().max() / 14 * (1 + 2.0**-7)


def test_what_is_sent_and_kept_over_steps_is_what_there_was():
    torch.manual_seed(0)
    codec, residual = Top(8, 256), torch.zeros(1000)
    steps = [torch.randn(1000) for _ in range(50)]
    total = sum(encode(codec, step, residual).double() for step in steps)
    exact = sum(step.double() for step in steps)
    assert torch.allclose(total + residual.double(), exact, atol=1e-4)
    assert (residual != 0).sum() > 900, "most of it is on its way"


def test_a_sum_of_rows_is_that_of_what_they_decode_to():
    torch.manual_seed(1)
    codec, n = Top(16, 256), 700
    values = [torch.randn(n) for _ in range(3)]
    rows = torch.zeros(3, codec.wire_bytes(n) + 30, dtype=torch.uint8)
    for r in (0, 2):
        codec.encode(Chunk(values[r], rows[r][: codec.wire_bytes(n)]))
    sent = [values[1] if r == 1 else encode(codec, values[r]) for r in range(3)]
    own, row, residual = (
        values[1].clone(),
        torch.zeros(codec.wire_bytes(n), dtype=torch.uint8),
        torch.zeros(n),
    )
    codec.reduce(Chunk(own, row, residual), rows, 1, 1 / 3)
    mean = sum(sent) / 3
    assert torch.allclose(own + residual / 3, mean, atol=1e-6)
    assert (own != 0).sum() <= 3 * 16


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_value_that_is_not_finite_is_seen_and_leaves_the_residual_as_it_was(poison):
    values, residual = torch.randn(2048), torch.ones(2048)
    values[7] = poison
    decoded = encode(Top(), values, residual)
    assert decoded[:1024].isnan().all()
    assert decoded[1024:].isfinite().all()
    assert residual.isfinite().all()


def test_1023_values_take_the_room_of_a_block():
    # A scale, 32 places of 10 bits and 32 codes of 4.
    assert [Top().wire_bytes(n) for n in (0, 1, 1024, 1025)] == [0, 58, 58, 116]


def test_what_cannot_be_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match="block must be 256, 1024 or 4096, not 512"):
        Top(32, 512)
    for keep in (0, 12, 264):
        with pytest.raises(ValueError, match=f"keep must be a multiple of 8, from 8 to .* not {keep}"):
            Top(keep, 1024)
