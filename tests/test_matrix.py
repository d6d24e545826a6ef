"""Every hook of ours keeps the contract, in every way DDP can be used."""

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from gradwire.ddp_comm_hooks import debugging_hooks, default_hooks, quantization_hooks
from gradwire.testing import Case, cases, check_hook
from tests.rows import ROWS


def fp16_around_torch(state, bucket):
    return default_hooks.fp16_compress_wrapper(torch_hooks.allreduce_hook)(state, bucket)


def bf16_around_torch(state, bucket):
    return default_hooks.bf16_compress_wrapper(torch_hooks.allreduce_hook)(state, bucket)


def narrow_channels(state, bucket):
    return quantization_hooks.quantization_perchannel_hook(state, bucket, bucket_size=64)


def rarely(*values):
    """Mark rows that another row comes close to: they run in `make test-full`."""
    return pytest.param(*values, marks=pytest.mark.full)


# hook, tolerance, what it makes of the gradients
RAW_HOOKS = [
    (default_hooks.allreduce_hook, 1e-6, "mean"),
    rarely(default_hooks.fp16_compress_hook, 2.0**-10, "mean"),
    rarely(default_hooks.bf16_compress_hook, 2.0**-7, "mean"),
    (debugging_hooks.noop_hook, 0.0, "local"),
    # A cast, a division and a sum, each in 16 bits and on each of up to four ranks.
    rarely(fp16_around_torch, 2.0**-8, "mean"),
    (bf16_around_torch, 2.0**-5, "mean"),
]
# 8 bits, of which parameters in one bucket share the range.
QUANTISED = [
    quantization_hooks.quantization_pertensor_hook,
    rarely(quantization_hooks.quantization_perchannel_hook),
    rarely(narrow_channels),
]


def runs(*, always):
    """Every row with every number of ranks; all but one of them for `make test-full`, unless all always."""
    return [
        pytest.param(
            row,
            size,
            id=f"{row.spec}-{size}",
            marks=() if always or size == row.world_size else pytest.mark.full,
        )
        for row in ROWS
        for size in row.world_sizes
    ]


@pytest.mark.parametrize(("row", "world_size"), runs(always=False))
def test_every_recipe_keeps_the_contract(row, world_size):
    report = check_hook(row.spec, world_size=world_size, **row.in_training)
    assert report.ok, report


# On eight ranks `make test` looks at what depends on their number, `make test-full` at everything.
WIDE_CASES = [Case(), Case(graph="find_unused"), Case(subgroup=True), Case(nonfinite=True)]


WIDE = [
    "int4",
    "int8:local_size=4",
    *(pytest.param(s, marks=pytest.mark.full) for s in ("int8", "fp8", "sign", "int4:local_size=4")),
]


@pytest.mark.parametrize("spec", WIDE)
def test_low_bit_recipes_keep_the_contract_on_eight_ranks(spec):
    row = next(row for row in ROWS if row.spec == spec.replace("=4", "=2"))
    report = check_hook(spec, world_size=8, cases=WIDE_CASES, **row.in_training)
    assert report.ok, report


@pytest.mark.full
@pytest.mark.parametrize("spec", ["int8", "fp8", "int4", "sign", "int8:local_size=4", "int4:local_size=4"])
def test_low_bit_recipes_keep_the_contract_on_eight_ranks_in_every_case(spec):
    row = next(row for row in ROWS if row.spec == spec.replace("=4", "=2"))
    report = check_hook(spec, world_size=8, **row.in_training)
    assert report.ok, report


@pytest.mark.full
@pytest.mark.parametrize(("row", "world_size"), runs(always=True))
def test_every_recipe_keeps_the_contract_in_every_combination(row, world_size):
    report = check_hook(row.spec, world_size=world_size, cases=cases(full=True), **row.in_training)
    assert report.ok, report


# The same recipes as above by another door: on three ranks, and by `make test-full` on two and four.
SIZES = [3, *(pytest.param(size, marks=pytest.mark.full) for size in (2, 4))]


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("hook", "tolerance", "expect"), RAW_HOOKS, ids=lambda value: getattr(value, "__name__", None)
)
def test_every_hook_function_keeps_the_contract_when_registered_with_ddp(hook, tolerance, expect, world_size):
    report = check_hook(hook, tolerance=tolerance, expect=expect, world_size=world_size, num_roundings=1)
    assert report.ok, report


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("hook", QUANTISED, ids=lambda hook: hook.__name__)
def test_every_quantised_hook_keeps_the_contract_when_registered_with_ddp(hook, world_size):
    report = check_hook(hook, tolerance=0.02, floor=1.0, world_size=world_size, num_roundings=1)
    assert report.ok, report


# In bf16, torch's hook divides and adds in bf16: an error that grows with the number of ranks.
@pytest.mark.parametrize("world_size", [3, pytest.param(8, marks=pytest.mark.full)])
def test_a_hook_of_torchs_keeps_the_contract_through_attach(world_size):
    report = check_hook(torch_hooks.allreduce_hook, tolerance=1e-6, via="attach", world_size=world_size)
    assert report.ok, report


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sum_in_bf16_is_allowed_a_rounding_per_rank_and_no_more(world_size):
    exact = {"tolerance": 0.0, "world_size": world_size, "cases": [Case(dtype="bfloat16")]}
    report = check_hook(torch_hooks.allreduce_hook, **exact)
    assert report.ok, report
    report = check_hook(torch_hooks.allreduce_hook, num_roundings=1, **exact)
    assert report.ok == (world_size == 2), report
