"""`check_averager`: every recipe holds, and what is planted is found."""

import pytest
import torch

from gradwire import Averager
from gradwire.testing import check_averager
from tests.rows import ROWS

# Errors of low rank, and of one bit with feedback, depend on the tensors. These are full matrices of noise,
# of which a few directions keep little.
TOLERANCES = {
    "powersgd": 4.0,
    "powersgd:rank=2": 8.0,
    "powersgd:rank=1,whole=true": 8.0,
    "powersgd:rank=4,factors=int2": 8.0,
    "acp:rank=2": 8.0,
    "topk": 8.0,
    "topk:momentum=0.9": 8.0,
    "auto": 0.5,  # in its first steps 2 ** -7
}
ROWS_HERE = [row for row in ROWS if "local_size" not in row.spec]


def check(spec, world_size):
    report = check_averager(spec, world_size=world_size, tolerance=TOLERANCES.get(spec))
    assert report.ok, report
    assert f"on {world_size} ranks: 8 of 8 cases hold" in str(report)


def rarely(row):
    """Leave rows to `make test-full` that differ from another one by their encoding alone."""
    always = {"fp32", "bf16", "int4", "int2", "sign", "powersgd", "fp32:reduction=sum", "noop"}
    return pytest.param(row, id=row.spec, marks=() if row.spec in always else pytest.mark.full)


@pytest.mark.parametrize("row", map(rarely, ROWS_HERE))
def test_every_recipe_keeps_the_contract_on_two_ranks(row):
    check(row.spec, 2)


@pytest.mark.parametrize("spec", ["fp32", "int4", "powersgd:rank=2"])
def test_recipes_keep_the_contract_on_three_ranks(spec):
    check(spec, 3)


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS_HERE, ids=lambda row: row.spec)
def test_every_recipe_keeps_the_contract_on_three_ranks(row):
    check(row.spec, 3)


class Halving(Averager):
    def average_(self, tensors, weight=None):
        super().average_(tensors, weight)
        for tensor in tensors.values() if isinstance(tensors, dict) else tensors:
            tensor.mul_(0.5)


class Local(Averager):
    """Leaves rank 0 its own values."""

    def average_(self, tensors, weight=None):
        given = list(tensors.values()) if isinstance(tensors, dict) else tensors
        own = [tensor.clone() for tensor in given]
        super().average_(tensors, weight)
        for tensor, before in zip(given, own, strict=True):
            if self._group.rank() == 0:
                tensor.copy_(torch.lerp(tensor, before, 1e-3))


class Forgetful(Averager):
    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("planted", "spec", "text"),
    [
        (Halving, "int4", "wrong size or direction"),
        (Halving, "fp32", "wrong size or direction"),
        (Local, "int8", "ranks have different"),
        (Forgetful, "int4", "is not what a run without a stop has"),
    ],
)
def test_what_is_planted_is_found(planted, spec, text):
    assert text in str(check_averager(spec, kind=planted))


def test_a_recipe_without_a_bound_needs_a_tolerance():
    with pytest.raises(ValueError, match="powersgd leaves out depends on the gradients"):
        check_averager("powersgd")
    with pytest.raises(ValueError, match="device must be one of cpu, cuda"):
        check_averager("fp32", device="tpu")
