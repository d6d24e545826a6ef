"""The reduce-scatter of a unit's gradients, in place of torch's own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.sharded.backward import Backward, HasSlot
from gradwire.sharded.units import Unit, UnnamedValues


class UnitReduceScatter:
    """An argument of ``set_custom_reduce_scatter``: it sums the gradients of one unit by a recipe.

    On CPU torch writes nothing to gradients before the pass ends, unless it accumulates or converts them.
    So there a reduce-scatter may end while the next unit's backward runs. Elsewhere the result is complete
    in the order of the current stream.
    """

    def __init__(self, unit: Unit, backward: Backward) -> None:
        self._unit = unit
        self._backward = backward

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the values that torch hands over, or takes back."""
        # Not earlier: until torch needs this memory, it computes while two buckets travel.
        self._backward.make_room()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Leave this rank's chunk of the reduced ``input_tensor`` in ``output_tensor``."""
        own = input_tensor.view(group.size(), -1)[group.rank()]
        is_sum = op == dist.ReduceOp.SUM  # which torch may divide afterwards
        may_be_late = (
            input_tensor.device.type == "cpu"
            and not is_sum
            and self._unit.may_write_later(output_tensor.dtype)
        )
        try:
            parameters = self._reduced(input_tensor.numel() // group.size())
        except ValueError as error:
            self._backward.fail(error)
            output_tensor.copy_(own)
            return
        self._backward.start(
            input_tensor,
            parameters,
            functools.partial(_copy, own, output_tensor),
            num_shards=group.size(),
            factor=_factor(op, group.size()),
            divisor=self._unit.divisor_of_sums(input_tensor.dtype, group.size()) if is_sum else 1.0,
            may_be_late=may_be_late,
        )

    def _reduced(self, numel: int) -> Sequence[HasSlot]:
        """Return the parameters of a chunk of ``numel`` values; torch leaves out those without a gradient."""
        trained = self._unit.trained
        expected = sum(each.padded_shape.numel() for each in trained)
        if expected == numel:
            return trained
        exchange, chooses_by_unit = self._backward.engine.recipe.exchange, self._backward.tuned is not None
        if chooses_by_unit or not exchange.sees_parameters:
            return [UnnamedValues(self._unit.name, numel)]
        raise ValueError(
            f"unit {self._unit.name!r} has parameters without a gradient: torch reduces {numel} of "
            f"{expected} values per rank, and does not tell which, so they cannot go by routes. Attach a "
            "recipe without routes (for sign, int3 and int2: with tables=same), or freeze what is not used; "
            "or call set_reduce_scatter_unused_params(True) on the model, if your torch has it"
        )


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _factor(op: Any, num_ranks: int) -> float:
    """Return the factor of the sum that a ``ReduceOp`` stands for."""
    if op == dist.ReduceOp.AVG:
        return 1 / num_ranks
    if op == dist.ReduceOp.SUM:
        return 1.0
    factor: float = op.__getstate__()[1]  # a premultiplied sum
    return factor
