"""Two-shot averaging: every rank sums one chunk of the bucket, then tells the others."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.buckets import BucketLayout, as_real
from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.handover import take_over_residuals
from gradwire.exchanges.links import Links
from gradwire.exchanges.rounds import Round, Rounds
from gradwire.exchanges.skipped import mask_of_skipped, skipped_parameters
from gradwire.exchanges.two_phase import Sum, TwoPhaseReduce, average_alone, seeds_of, two_shot_bytes
from gradwire.ops import Family


@dataclass(frozen=True)
class TwoShot:
    """Scatter-reduce, then gather, with every message encoded by one codec.

    The owner of a chunk sums it in fp32 (fp64 for fp64 buckets that travel as they are) and in rank
    order, whatever travels, so a sum does not depend on who owns it. All ranks, the owner too, end with
    what the owner's row decodes to, so all ranks have the same bits. Over NCCL, fp32 and fp64 buckets that
    travel as they are go by NCCL's own allreduce, in an order of its own.

    Note [One residual for two shots]: with feedback, a rank adds to its gradients what its earlier rows
    have left out (Seide et al., 2014; Karimireddy et al., arXiv:1901.09847). In the chunks of others
    that is its worker residual. In its own chunk, which it need not send, it is what its rows of sums
    have left out, divided by the scale of the mean: held back from all ranks, but kept as if it were held
    back from this rank's gradients alone. So one tensor per bucket, in units of local gradients, has
    both, and it stays true whoever owns a chunk when DDP rebuilds its buckets:
    ``sum over ranks and steps of gradients == sum of results / scale + sum over ranks of residuals``.
    """

    codec: Codec
    feedback: torch.dtype | None = None
    """The dtype of residuals, if there are any."""
    seed: int = 0
    """Where stochastic rounding starts."""

    communicates = True
    sees_parameters = False
    starts = (0,)

    @property
    def kernels(self) -> frozenset[Family]:
        return self.codec.kernels

    def __post_init__(self) -> None:
        if self.feedback is not None and not self.codec.keeps_residual:
            raise ValueError(f"{self.codec} leaves out nothing that feedback could keep")
        if self.feedback not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"residuals are torch.float32 or torch.bfloat16, not {self.feedback}")

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        flat = as_real(flat)
        yield from take_over_residuals(flat, context, self.feedback)
        codec, group = self.codec.resolve(flat.dtype), context.group
        residual = self.residual(flat, context)
        if group.size == 1:
            average_alone(flat, residual, context)
            return
        if group.native_sum is not None and _is_exact(codec, flat.dtype):
            group.native_sum(flat.mul_(context.scale))
            return
        values = flat
        if codec.works_in not in (None, flat.dtype):
            assert codec.works_in is not None
            values = context.scratch.like("values", flat, codec.works_in).copy_(flat)
        mask = yield from self.mask_of_skipped(values, context)
        with skipped_parameters(mask, values, residual):
            yield (self._sum(values, residual, context),)
        if values is not flat:
            flat.copy_(values)

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        numel, dtype = layout.real_values
        codec = self.codec.resolve(dtype)
        return 0 if _is_exact(codec, dtype) else codec.wire_bytes(numel)

    def residual(self, flat: Tensor, context: Context) -> Tensor | None:
        """What earlier rows have left out of this bucket, if it is kept."""
        if self.feedback is None:
            return None
        return context.memory.flat("residual", context.layout, self.feedback, flat.device)

    def mask_of_skipped(self, values: Tensor, context: Context) -> Generator[Round, None, Tensor | None]:
        """True where parameters that no rank has used keep their residuals, if there can be such."""
        if self.feedback is None or not context.may_skip or context.layout.dtype.is_complex:
            return None
        return (yield from mask_of_skipped(values, context))

    def average(self, values: Tensor, residual: Tensor | None, context: Context) -> None:
        """Average values of a dtype that the codec takes, over a group of any size."""
        TwoPhaseReduce([self._sum(values, residual, context)], context).run()

    def _sum(self, values: Tensor, residual: Tensor | None, context: Context) -> Sum:
        codec = self.codec.resolve(values.dtype)
        return Sum(values, codec, residual, seeds_of(codec, self.seed, context))

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        numel, dtype = layout.real_values
        return [Links(0, sent) for sent in two_shot_bytes(self.codec.resolve(dtype), numel, world_size)]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        return Links(0, 2)


def _is_exact(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether what is sent is what is added up, so that a backend may do it in an order of its own."""
    return codec.in_place and dtype in (torch.float32, torch.float64)


PLAIN = TwoShot(Raw())
"""Averaging without compression."""
