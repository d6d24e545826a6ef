"""Two-shot averaging: every rank sums one chunk of the bucket, then sends it to the others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout, as_real
from gradwire.codecs import Codec, Raw, Rotated, Top
from gradwire.exchanges.context import Context
from gradwire.exchanges.links import Links
from gradwire.exchanges.one_shot import average_bytes, num_rounds
from gradwire.exchanges.residuals import migrate_residuals
from gradwire.exchanges.rounds import Round, Rounds, take_sums
from gradwire.exchanges.scatter import Sum
from gradwire.exchanges.two_phase import average_alone, seeds_of
from gradwire.exchanges.unused import keep_unused_residuals, unused_mask
from gradwire.exchanges.velocities import momentum_applied
from gradwire.ops import Family, cast_scaled


@dataclass(frozen=True)
class TwoShot:
    """Scatter-reduce, then gather, with every message encoded by one codec.

    The owner of a chunk sums it in fp32 and in rank order, whatever the encoding. (Uncompressed fp64 buckets
    are summed in fp64.) It adds its own values as they are, so only uncompressed sums do not depend on which
    rank owns them. All ranks, the owner included, end with what the owner's row decodes to, so all have the
    same bits.

    Two ranks take one shot if values are encoded, see `one_shot.take_one_round`: each sums what the rows of
    both decode to.

    Note [Sums of NCCL's own]: uncompressed fp32 and fp64 buckets use NCCL's allreduce, which sums in an order
    of its own. So do 16-bit values of two ranks that travel without a scale: ``bf16``, and buckets that are
    16 bits wide themselves. Each rank's values are scaled and rounded to 16 bits, and their sum is rounded
    once. Without NCCL, two ranks do not round the sum of ``bf16``, so results differ by that rounding. Those
    of a 16-bit bucket do not differ, but for subnormal numbers, of which half may be rounded.

    Note [One residual for two shots]: with feedback, a rank adds to its gradients what its earlier rows
    have left out (Seide et al., 2014; Karimireddy et al., arXiv:1901.09847). For the chunks of other ranks,
    that is the error of the rows it sent to their owners. For its own chunk, it is the error of the sums
    that it sent to all ranks, divided by the scale of the mean. That error is missing on every rank, but it
    is kept as if it were missing from this rank's gradients alone. So one tensor per bucket, in units of
    local gradients, holds both errors. (With one shot there is only the first, for all values.) It stays
    right when DDP rebuilds its buckets and chunks change owners:
    ``sum over ranks and steps of gradients == sum of results / scale + sum over ranks of residuals``.
    """

    codec: Codec
    feedback: torch.dtype | None = None
    """The dtype of residuals; None to keep none."""
    seed: int = 0
    """The seed of stochastic rounding."""
    momentum: float = 0.0
    """The momentum that ranks apply before they send, see Note [Momentum before sending]."""

    communicates = True
    sees_parameters = False
    starts = (0,)

    @property
    def kernels(self) -> frozenset[Family]:
        return self.codec.kernels

    def __post_init__(self) -> None:
        if self.feedback is not None and not self.codec.keeps_residual:
            raise ValueError(f"{self.codec} leaves out nothing that feedback could keep: leave feedback out")
        if self.feedback not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"feedback must be torch.float32, torch.bfloat16 or None, not {self.feedback}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and less than 1, not {self.momentum}")
        if self.momentum and self.feedback is None:
            raise ValueError("momentum needs feedback, which adds up what is not sent: leave feedback on")

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        flat = as_real(flat)
        yield from migrate_residuals(flat, context, self.feedback, momentum=self.momentum)
        codec, group = self.codec.resolve(flat.dtype), context.group
        residual = self.residual(flat, context)
        if group.size == 1:
            with self.momentum_applied(flat, None, context, is_exact=True):
                average_alone(flat, residual, context)
            return
        if group.native_sum is not None and may_sum_natively(codec, group.size):
            _sum_natively(flat, codec, group.native_sum, context)
            return
        values = context.scratch.converted("values", flat, codec.works_in or flat.dtype)
        mask = yield from self.unused_mask(values, context)
        momentum = self.momentum_applied(values, mask, context)
        with momentum, keep_unused_residuals(mask, values, residual):
            yield (self.sum_of(values, residual, context),)
        if values is not flat:
            flat.copy_(values)

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        numel, dtype = layout.real_values
        codec = self.codec.resolve(dtype)
        return 0 if may_sum_natively(codec) else codec.wire_bytes(numel)

    def repeats_as(self, step: int) -> Hashable | None:
        return 0 if not self.momentum and repeats_with(self.codec) else None

    def residual(self, flat: Tensor, context: Context) -> Tensor | None:
        """Return what earlier steps have left out of this bucket; None if that is not kept."""
        if self.feedback is None:
            return None
        return context.memory.flat("residual", context.layout, self.feedback, flat.device)

    def unused_mask(self, values: Tensor, context: Context) -> Generator[Round, None, Tensor | None]:
        """Return the mask of unused parameters, whose residuals stay; None if there can be none."""
        if self.feedback is None or not context.may_have_unused or context.layout.dtype.is_complex:
            return None
        return (yield from unused_mask(values, context))

    def momentum_applied(
        self, values: Tensor, mask: Tensor | None, context: Context, *, is_exact: bool = False
    ) -> AbstractContextManager[None]:
        """Apply the momentum to values while they are averaged; ``is_exact`` if that encodes nothing."""
        clears = isinstance(self.codec, Top) and not is_exact
        return momentum_applied(self.momentum, self.feedback, values, mask, context, clears=clears)

    def average(self, values: Tensor, residual: Tensor | None, context: Context) -> None:
        """Average values of a dtype that the codec takes, over a group of any size."""
        take_sums([self.sum_of(values, residual, context)], context)

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        numel, dtype = layout.real_values
        return [Links(0, sent) for sent in average_bytes([(self.codec.resolve(dtype), numel)], world_size)]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        return Links(0, num_rounds([self.codec.resolve(layout.real_values[1])], world_size))

    def sum_of(self, values: Tensor, residual: Tensor | None, context: Context) -> Sum:
        """Return the sum over ranks that averages values of a dtype that the codec takes."""
        codec = self.codec.resolve(values.dtype)
        return Sum(values, codec, residual, seeds_of(codec, self.seed, context))


def repeats_with(codec: Codec) -> bool:
    """Return True if a codec does the same work in every step; `Exchange.repeats_as` says what that is."""
    if isinstance(codec, Top):
        return False  # sorts, which may make the host wait
    return not codec.stochastic or isinstance(codec, Rotated)


def may_sum_natively(codec: Codec, num_ranks: int | None = None) -> bool:
    """Return True if a backend may sum rows itself; without ``num_ranks``, if it may for any number.

    It sums in the dtype of the rows. In 16 bits it would round after each rank, where we round once. So it
    may sum two values, of which there is one sum.
    """
    is_wide = codec.row_dtype in (torch.float32, torch.float64)
    return is_wide or (codec.row_dtype in (torch.float16, torch.bfloat16) and num_ranks == 2)


def _sum_natively(flat: Tensor, codec: Codec, native_sum: Callable[[Tensor], None], context: Context) -> None:
    """Scale each rank's values, round them to the dtype of rows, and let the backend sum them."""
    if codec.in_place:
        native_sum(flat.mul_(context.scale))
        return
    assert codec.row_dtype is not None
    num_bytes = codec.wire_bytes(flat.numel())
    row = context.scratch.bytes("rows", num_bytes, flat.device).view(codec.row_dtype)
    cast_scaled(flat, context.scale, row)
    native_sum(row)
    flat.copy_(row)


PLAIN = TwoShot(Raw())
"""Averaging without compression."""
