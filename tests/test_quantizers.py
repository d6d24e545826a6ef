"""The benchmark of ways to send a gradient in few bits."""

import importlib
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def quantizers():
    path = list(sys.path)
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    yield importlib.import_module("quantizers")
    sys.path[:] = path


@pytest.fixture(scope="module")
def measured(quantizers):
    """Return what each way costs and loses with normal values."""
    generator = torch.Generator().manual_seed(0)
    workers = list(torch.randn(2, 1 << 15, generator=generator))
    return {name: quantizers.measure(send, workers) for name, send in quantizers.ways().items()}


def test_no_way_beats_the_bound_of_normal_values(measured):
    assert min(each.bits / each.least_bits for each in measured.values()) > 1


# Max, "Quantizing for minimum distortion", 1960; unbiased signs have the error pi / 2 - 1.
@pytest.mark.parametrize(
    ("name", "bits", "error"),
    [
        ("int2", 2, 0.1175),
        ("int3", 3, 0.03454),
        ("4 bits, rotated", 4, 0.009497),
        ("1 bit, the smallest error", 1, 0.3634),
        ("int2, 1 bit of a worker", 1, 0.5708),
    ],
)
def test_normal_values_have_the_errors_of_the_literature(measured, name, bits, error):
    assert measured[name].bits == pytest.approx(bits + 16 / 1024)
    assert measured[name].error == pytest.approx(error, rel=0.02)


def test_a_hadamard_transform_is_its_own_inverse(quantizers):
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    once = quantizers.hadamard(x)
    assert (once - x).abs().max() > 1
    torch.testing.assert_close(quantizers.hadamard(once), x)
