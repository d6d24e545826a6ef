"""Low-rank averaging: matrices of gradients travel as two thin factors (PowerSGD, ACP-SGD)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradwire import ops
from gradwire.buckets import BucketLayout
from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.factors import Which, mean_bytes, num_values
from gradwire.exchanges.links import Links
from gradwire.exchanges.low_rank_step import LowRankStep, message_rounds
from gradwire.exchanges.matrices import MatrixPlan, plan_of
from gradwire.exchanges.one_shot import encoded_bytes, sum_bytes
from gradwire.exchanges.residuals import migrate_residuals
from gradwire.exchanges.rounds import Rounds
from gradwire.exchanges.two_phase import shared_two_shot_bytes
from gradwire.exchanges.two_shot import PLAIN, repeats_with
from gradwire.exchanges.unused import keep_unused_residuals, unused_mask
from gradwire.ops import Side


@dataclass(frozen=True)
class LowRank:
    """Average a bucket's matrices M as ``P.T @ Q``, with P of shape (rank, rows) and Q (rank, columns).

    With two rounds (PowerSGD, Vogels et al., arXiv:1905.13727): ``P = orthogonalize(sum of Q @ M.T)`` with
    the Q of the step before, then ``Q = sum of P @ M``. With one round (ACP-SGD, Zhang et al.,
    arXiv:2302.06488) the factors take turns: even steps compute Q with the P of the step before, odd steps
    compute P with the Q of the step before. Values that are not worth compressing travel uncompressed in the
    first message.

    Note [One pass of sums]: with feedback, the gradient is added to the residual in place, and that sum is M.
    The new residual is M less ``P.T @ Q`` of this rank's own factors: what this rank alone has left out. The
    mean of these residuals is what the averaged gradient has left out. So results equal those of residuals
    taken against the mean. But residuals against the mean also collect the differences between ranks and
    grow without bound, and these do not.

    Note [Steps that do not count]: with the first message, each rank votes on each matrix: 0 if its gradient
    is zero, 1 if it is not, NaN if it is not finite. A matrix whose gradient is not finite on some rank
    becomes NaN on all ranks. A matrix whose gradient is zero on every rank becomes zero, since DDP drops the
    gradient of a parameter that no rank has used. Both keep the residual and the warm start that they had
    before the step.

    Note [Leading vectors]: each step starts from the factors of the step before, which is a step of
    orthogonal iteration, and that sorts vectors. So the first ones are the longest: of 32 vectors, the first
    four have most of the energy. With one encoding for all, the error of the first vector alone is larger
    than the last vectors are. A few more bits for an eighth of the vectors remove most of the error.
    """

    rank: int = 4
    start: int = 0
    """The first step that compresses; earlier steps average uncompressed."""
    min_compression_rate: float = 2.0
    """Compress a matrix if its factors are smaller by more than this rate."""
    feedback: bool = True
    """True to add what a step leaves out to the next step."""
    warm_start: bool = True
    """True to start a step from the factors of the step before; False to start from random ones."""
    seed: int = 0
    whole: bool = False
    """True for one matrix per bucket; False for one matrix per parameter."""
    num_rounds: Literal[1, 2] = 2
    factors: Codec | None = None
    """The encoding of factors; None to send them as they are. Factors of fp64 buckets are never encoded."""
    leading: Codec | None = None
    """The encoding of the first vectors of each factor, see Note [Leading vectors]; None for that of all."""

    communicates = True

    @property
    def kernels(self) -> frozenset[ops.Family]:
        own: frozenset[ops.Family] = frozenset({"casts", "low_rank"})
        return own.union(*(codec.kernels for codec in self._codecs()))

    @property
    def sees_parameters(self) -> bool:
        return not self.whole

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, self.start) if self.start else (0,)

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start", 0), ("min_compression_rate", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.num_rounds == 1 and not self.warm_start:
            raise ValueError(
                "one round needs the factors of the step before: leave warm_start on, or use two rounds"
            )

    def plan(self, layout: BucketLayout) -> MatrixPlan:
        """Return which values of a bucket are compressed, in which matrices."""
        encodings = self._encodings(layout.dtype)
        share = mean_bytes(encodings, self.rank) / 4 if encodings else 1.0
        return plan_of(layout, self.rank, self.min_compression_rate * share, self.whole)

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        plan = self.plan(context.layout)
        if context.group.size == 1 or self._is_plain(context.layout, context.step):
            yield from PLAIN.rounds(flat, context)
            return
        work = _work_dtype(flat.dtype)
        compressed = replace(context, layout=plan.sums)
        if self.feedback:
            yield from migrate_residuals(flat, compressed, work)
            sums = context.memory.flat("residual", plan.sums, work, flat.device)
        else:
            num_bytes = plan.sums.numel * work.itemsize
            sums = context.scratch.bytes("sums", num_bytes, flat.device).view(work).zero_()
            yield from migrate_residuals(sums, compressed, None)
        may_have_unused = self.whole and self.feedback and context.may_have_unused
        mask = (yield from unused_mask(flat, context)) if may_have_unused else None
        with keep_unused_residuals(mask, flat, sums):
            yield from self._step(plan, flat, sums, context).rounds()

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        if self._is_plain(layout, step):
            return PLAIN.shared_bytes(layout, step)
        messages = self._messages(layout, step)
        return sum(codec.wire_bytes(numel) for message in messages for codec, numel in message)

    def repeats_as(self, step: int) -> Hashable | None:
        if not self.warm_start or not all(map(repeats_with, self._codecs())):
            return None
        return step < self.start, self._sides(step)

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        if self._is_plain(layout, step):
            return PLAIN.link_bytes(layout, world_size, step)
        sent = [_message_bytes(message, world_size) for message in self._messages(layout, step)]
        return [Links(0, sum(of_rank)) for of_rank in zip(*sent, strict=True)]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        if self._is_plain(layout, step):
            return PLAIN.link_rounds(layout, world_size, step)
        messages = self._messages(layout, step)
        return Links(0, sum(message_rounds(message, world_size) for message in messages))

    def _step(self, plan: MatrixPlan, flat: Tensor, sums: Tensor, context: Context) -> LowRankStep:
        sides, encodings = self._sides(context.step), self._encodings(flat.dtype)
        return LowRankStep(
            plan, flat, sums, context, sides, encodings, self.feedback, self.warm_start, self.seed
        )

    def _codecs(self) -> list[Codec]:
        return [codec for codec in (self.factors, self.leading) if codec is not None]

    def _encodings(self, dtype: torch.dtype) -> list[tuple[Codec, Which]]:
        """Return the encodings of a factor for a bucket of this dtype, each with the vectors that it is for.

        There are none if factors travel as they are.
        """
        if self.factors is None or _work_dtype(dtype) != torch.float32:
            return []
        others = self.factors.resolve(torch.float32)
        if self.leading is None:
            return [(others, "all")]
        return [(self.leading.resolve(torch.float32), "leading"), (others, "others")]

    def _is_plain(self, layout: BucketLayout, step: int) -> bool:
        """Return True if nothing of a bucket is compressed in this step."""
        return step < self.start or layout.dtype.is_complex or not self.plan(layout).batches

    def _messages(self, layout: BucketLayout, step: int) -> list[list[tuple[Codec, int]]]:
        """Return the sums of each message in a step that compresses: encoding and number of values."""
        plan, exact = self.plan(layout), Raw(_work_dtype(layout.dtype))
        num_beside = plan.num_matrices + plan.num_plain
        encodings = self._encodings(layout.dtype)
        messages: list[list[tuple[Codec, int]]] = []
        for beside, side in zip((num_beside, 0), self._sides(step), strict=False):
            if encodings:
                of_factors = [(codec, num_values(plan.batches, side, which)) for codec, which in encodings]
                messages.append([*of_factors, (exact, beside)])
            else:
                messages.append([(exact, num_values(plan.batches, side, "all") + beside)])
        return messages

    def _sides(self, step: int) -> tuple[Side, ...]:
        """Return the factors that a step computes, one in each round; with one round they take turns."""
        if self.num_rounds == 2:
            return ("left", "right")
        return ("left",) if step % 2 else ("right",)


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products and residuals: at least fp32, also for buckets of 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def _message_bytes(message: list[tuple[Codec, int]], world_size: int) -> list[int]:
    """Return the exact bytes that each rank sends for a message."""
    codec, numel = message[0]
    if isinstance(codec, Raw):
        assert codec.dtype is not None
        return sum_bytes(numel, codec.dtype, world_size)
    if message_rounds(message, world_size) == 1:
        return [(world_size - 1) * encoded_bytes(message)] * world_size
    return shared_two_shot_bytes(message, world_size)
