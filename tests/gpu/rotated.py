"""The Triton kernels of rotated blocks, against the reference on the GPU and the kernels on the CPU."""

import itertools
import math

import torch

from gradwire.ops import NO_RANK, Chunk, RotatedFormat, RotatedRows, Seed
from gradwire.ops.cpu import rotated as cpu_kernels
from gradwire.ops.cuda import rotated as cuda_kernels
from gradwire.ops.reference import rotated as reference

SEED = Seed(5, 0x9E3779B9)
# The formats of sums, and of the rows that are summed. A kernel takes seconds to compile.
PAIRS = [
    (RotatedFormat(2, 1024), RotatedFormat(1, 1024, unbiased=True)),
    (RotatedFormat(1, 1024, unbiased=True), RotatedFormat(2, 1024)),
    (RotatedFormat(3, 256), RotatedFormat(3, 256)),
    (RotatedFormat(2, 4096, unbiased=True), RotatedFormat(2, 4096)),
    (RotatedFormat(4, 1024), RotatedFormat(4, 1024)),
]


def results(kernels, device, form, worker, values, rows, scale):
    """Encode, decode and sum; return the row, what it decodes to, the row of the sum, and three sums."""
    values, rows = values.to(device), rows.to(device)
    row = torch.zeros(form.row_bytes(values.numel()), dtype=torch.uint8, device=device)
    own_row, own, decoded = row.clone(), values.clone(), torch.empty_like(values)
    kernels.encode(form, Chunk(values, row, None, SEED))
    kernels.decode(form, row, decoded, SEED)
    terms, total, total_of_rows = RotatedRows(worker, rows, SEED), values.clone(), torch.empty_like(values)
    kernels.reduce(form, Chunk(own, own_row, None, SEED), terms, 1, scale)
    kernels.sum_rows(total, terms, 1, scale)
    kernels.sum_rows(total_of_rows, terms, NO_RANK, scale)
    return [each.cpu() for each in (row, decoded, own_row, own, total, total_of_rows)]


def check_kernels():
    """Compare on the GPU and with the CPU, bit for bit."""
    num_compared = 0
    for form, worker in PAIRS:
        for n, magnitude in ((1, 1.0), (1000, 1e-20), (5003, 1.0), (5004, 1e20), (300_001, 1e-10)):
            torch.manual_seed(n)
            values = torch.randn(n) * torch.randn(n).exp() * magnitude
            values[n // 3] = 0.0
            rows = torch.zeros(3, -(-worker.row_bytes(n) // 64) * 64, dtype=torch.uint8)
            for r in range(3):
                term = Chunk(torch.randn(n) * magnitude, rows[r], None, SEED.of_rank(r))
                cpu_kernels.encode(worker, term)
            common = form, worker, values, rows
            on_cpu = results(cpu_kernels, "cpu", *common, 1 / 3)
            by_torch = results(reference, "cuda", *common, 1 / 3)
            by_triton = results(cuda_kernels, "cuda", *common, 1 / 3)
            on_device = results(cuda_kernels, "cuda", *common, torch.tensor(1 / 3, device="cuda"))
            for a, b, c, d in zip(on_cpu, by_torch, by_triton, on_device, strict=True):
                assert torch.equal(a, b), (form, n, "reference")
                assert torch.equal(a, c), (form, n, "Triton")
                assert torch.equal(a, d), (form, n, "Triton, scale on the device")
                num_compared += 1
    return f"{num_compared} tensors are equal"


def check_poison():
    """A block with a value that is not finite comes back as NaN, and spares the others."""
    for poison, bits in itertools.product((math.inf, -math.inf, math.nan), (1, 2, 3, 4)):
        form, values = RotatedFormat(bits, 1024), torch.randn(3000, device="cuda")
        values[1500] = poison
        row = torch.zeros(form.row_bytes(3000), dtype=torch.uint8, device="cuda")
        cuda_kernels.encode(form, Chunk(values, row, None, SEED))
        cuda_kernels.decode(form, row, values, SEED)
        assert values[1024:2048].isnan().all()
        assert values[:1024].isfinite().all()
        assert values[2048:].isfinite().all()


CHECKS = {"rotated kernels": check_kernels, "rotated poison": check_poison}
