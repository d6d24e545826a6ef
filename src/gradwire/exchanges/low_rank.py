"""Low-rank averaging: matrices of gradients travel as two thin factors (PowerSGD, ACP-SGD)."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradwire import ops
from gradwire.buckets import BucketLayout
from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.factors import FactorPart, Which, factor_part, mean_bytes, num_values
from gradwire.exchanges.links import Links
from gradwire.exchanges.matrices import MatrixPlan, plan_of
from gradwire.exchanges.one_shot import encoded_bytes, one_round_pays, sum_bytes
from gradwire.exchanges.residuals import migrate_residuals
from gradwire.exchanges.rounds import Round, Rounds
from gradwire.exchanges.scatter import Sum
from gradwire.exchanges.two_phase import seeds_of, shared_two_shot_bytes
from gradwire.exchanges.two_shot import PLAIN, repeats_with
from gradwire.exchanges.unused import keep_unused_residuals, unused_mask
from gradwire.ops import OTHER, Seed, Side
from gradwire.torch_private import copy_all_


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
        share = mean_bytes(self._encodings(), self.rank) / 4 if self._encodes(layout.dtype) else 1.0
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
            yield from _LowRankStep(self, plan, flat, sums, context).rounds()

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        if self._is_plain(layout, step):
            return PLAIN.shared_bytes(layout, step)
        messages = self._messages(layout, step)
        return sum(codec.wire_bytes(numel) for message in messages for codec, numel in message)

    def repeats_as(self, step: int) -> Hashable | None:
        if not self.warm_start or not all(map(repeats_with, self._codecs())):
            return None
        return step < self.start, self.num_rounds == 1 and self._side_at(step)

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        if self._is_plain(layout, step):
            return PLAIN.link_bytes(layout, world_size, step)
        sent = [_message_bytes(message, world_size) for message in self._messages(layout, step)]
        return [Links(0, sum(of_rank)) for of_rank in zip(*sent, strict=True)]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        if self._is_plain(layout, step):
            return PLAIN.link_rounds(layout, world_size, step)
        messages = self._messages(layout, step)
        return Links(0, sum(_message_rounds(message, world_size) for message in messages))

    def _encodes(self, dtype: torch.dtype) -> bool:
        """Return True if factors are encoded for a bucket of this dtype."""
        return self.factors is not None and _work_dtype(dtype) == torch.float32

    def _codecs(self) -> list[Codec]:
        return [codec for codec in (self.factors, self.leading) if codec is not None]

    def _encodings(self) -> list[tuple[Codec, Which]]:
        """Return the encodings of a factor, each with the vectors that it is for."""
        assert self.factors is not None
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
        sides: list[Side] = ["left", "right"] if self.num_rounds == 2 else [self._side_at(step)]
        messages: list[list[tuple[Codec, int]]] = []
        for beside, side in zip((num_beside, 0), sides, strict=False):
            if self._encodes(layout.dtype):
                of_factors = [
                    (codec, num_values(plan.batches, side, which)) for codec, which in self._encodings()
                ]
                messages.append([*of_factors, (exact, beside)])
            else:
                messages.append([(exact, num_values(plan.batches, side, "all") + beside)])
        return messages

    def _side_at(self, step: int) -> Side:
        """Return the factor that this step computes if there is one round."""
        return "left" if step % 2 else "right"


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products and residuals: at least fp32, also for buckets of 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def _message_bytes(message: list[tuple[Codec, int]], world_size: int) -> list[int]:
    """Return the exact bytes that each rank sends for a message."""
    codec, numel = message[0]
    if isinstance(codec, Raw):
        assert codec.dtype is not None
        return sum_bytes(numel, codec.dtype, world_size)
    if _message_rounds(message, world_size) == 1:
        return [(world_size - 1) * encoded_bytes(message)] * world_size
    return shared_two_shot_bytes(message, world_size)


def _message_rounds(message: list[tuple[Codec, int]], world_size: int) -> int:
    """Return 1 if ranks send each other all of a message, 2 if each sums a part and passes that on."""
    return 1 if one_round_pays(encoded_bytes(message), world_size) else 2


class _LowRankStep:
    """The averaging of one bucket in one step that compresses."""

    def __init__(
        self, options: LowRank, plan: MatrixPlan, flat: Tensor, sums: Tensor, context: Context
    ) -> None:
        self._options = options
        self._plan = plan
        self._flat = flat
        self._sums = sums
        self._context = context
        self._kernels = ops.low_rank(flat, sums)

    def rounds(self) -> Rounds:
        batches = self._plan.batches
        side = self._options._side_at(self._context.step) if self._options.num_rounds == 1 else "left"
        basis = self._start(OTHER[side])
        factor, own, votes = yield from self._find_first(side, basis)
        if self._options.num_rounds == 2:
            self._kernels.orthogonalize(batches, side, factor, None)
            side, basis = "right", factor
            factor, own = yield from self._find_second(basis)
        kept = self._remembered(side) if self._options.warm_start else None
        self._kernels.judge(batches, side, factor, votes, kept)
        sums = self._sums if self._options.feedback else None
        means, owns = ((factor, basis), (own, basis)) if side == "left" else ((basis, factor), (basis, own))
        self._kernels.finish(batches, self._flat, sums, *means, *owns, votes)

    def _start(self, side: Side) -> Tensor:
        """Return an orthonormal basis to start from: the step before's, or random where there is none."""
        options, dtype, device = self._options, self._sums.dtype, self._sums.device
        if options.warm_start:
            basis = self._remembered(side)
            key = self._layout(side), dtype, device, options.seed
            spare = self._context.memory.cached(key, self._context.step, lambda: self._draw(side, 0))
        else:
            basis, spare = self._draw(side, self._context.step), None
        self._kernels.orthogonalize(self._plan.batches, side, basis, spare)
        return basis

    def _draw(self, side: Side, step: int) -> Tensor:
        """Return random numbers that depend on seed, parameter and step, not on the bucket."""
        layout = self._layout(side)
        flat = torch.empty(layout.numel, dtype=self._sums.dtype, device=self._sums.device)
        # Not by a generator of torch: its numbers differ between kinds of CPUs and of GPUs.
        for slot in layout.slots:
            values = flat[slot.offset : slot.offset + slot.numel]
            ops.fill_uniformly(values, Seed.of(self._options.seed, step, slot.name))
        return flat

    def _find_first(self, side: Side, basis: Tensor) -> Generator[Round, None, tuple[Tensor, Tensor, Tensor]]:
        """Compute a factor with the first message; return its sum, this rank's own share, and the votes."""
        plan, kernels = self._plan, self._kernels
        sizes = [self._layout(side).numel, plan.num_matrices, plan.num_plain]
        message = self._scratch("first", sum(sizes))
        factor, votes, plain = message.split(sizes)
        find = kernels.accumulate_and_project if side == "left" else kernels.accumulate_and_project_back
        find(plan.batches, self._flat, self._sums, votes, basis, factor)
        outside, inside = self._runs(plain)
        _copy(outside, inside)
        yield from migrate_residuals(plain, replace(self._context, layout=plan.plain), None)
        # With two rounds, the first factor is only the basis of the second: its own share is not needed.
        own = None if self._options.num_rounds == 2 else self._scratch("own", factor.numel())
        yield from self._sum(side, factor, own, message)
        _copy(inside, outside)
        return factor, factor if own is None else own, votes

    def _find_second(self, left: Tensor) -> Generator[Round, None, tuple[Tensor, Tensor]]:
        """Compute the right factor; return its sum over ranks, and this rank's own share."""
        factor = self._scratch("second", self._plan.right.numel)
        self._kernels.project_back(self._plan.batches, self._sums, left, factor)
        own = self._scratch("own", factor.numel())
        yield from self._sum("right", factor, own, factor)
        return factor, own

    def _sum(self, side: Side, factor: Tensor, own: Tensor | None, message: Tensor) -> Rounds:
        """Sum a message that begins with a factor; ``own`` becomes this rank's share of that factor."""
        if not self._options._encodes(self._flat.dtype):
            if own is not None:
                own.copy_(factor)
            yield (Sum(message),)
            return
        rest = message[factor.numel() :]
        exact = Raw(rest.dtype)  # a codec that changes nothing, so that the rest travels with the factor
        parts = self._parts(side, factor, "part")
        shares = [] if own is None else self._parts(side, own, "own part")
        shapes = [(part.codec, part.values.numel()) for part in parts]
        in_one_round = _message_rounds([*shapes, (exact, rest.numel())], self._context.group.size) == 1
        sums = []
        for number, part in enumerate(parts):
            part.take()
            share = shares[number].values if shares else None
            sums.append(self._sum_of(part, share, f"left out {number}", in_one_round=in_one_round))
        yield (*sums, Sum(rest, exact, in_one_round=in_one_round))
        for kept, each in zip(shares, sums, strict=False):  # nothing is kept if nobody asks for the own share
            if each.residual is not None:
                kept.values.sub_(each.residual)
        for part in (*parts, *shares):
            part.put_back()

    def _sum_of(self, part: FactorPart, share: Tensor | None, name: str, *, in_one_round: bool) -> Sum:
        """Return the sum of a part. This rank's share of it becomes ``share``, less the sum's residual."""
        seeds = seeds_of(part.codec, self._options.seed, self._context)
        if in_one_round:
            return Sum(part.values, part.codec, seeds=seeds, in_one_round=True, sent=share)
        if share is None:
            return Sum(part.values, part.codec, seeds=seeds)
        share.copy_(part.values)
        left_out = self._scratch(name, share.numel()).zero_()
        return Sum(part.values, part.codec, left_out, seeds)

    def _parts(self, side: Side, factors: Tensor, name: str) -> list[FactorPart]:
        """Return the vectors of factors by encoding."""
        return [
            factor_part(
                codec,
                which,
                factors,
                self._plan.batches,
                side,
                lambda kind, numel: self._scratch(f"{name} {kind}", numel),
            )
            for codec, which in self._options._encodings()
        ]

    def _runs(self, plain: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the uncompressed values: their places in the message, and those in the bucket."""
        outside, inside, position = [], [], 0
        for start, end in self._plan.runs:
            outside.append(plain[position : position + end - start])
            inside.append(self._flat[start:end])
            position += end - start
        return outside, inside

    def _remembered(self, side: Side) -> Tensor:
        memory, layout = self._context.memory, self._layout(side)
        # An earlier recipe may have left factors of another rank (width), which cannot be started from.
        return memory.flat(_NAMES[side], layout, self._sums.dtype, self._sums.device, may_change=True)

    def _layout(self, side: Side) -> BucketLayout:
        return self._plan.left if side == "left" else self._plan.right

    def _scratch(self, name: str, numel: int) -> Tensor:
        num_bytes = numel * self._sums.dtype.itemsize
        return self._context.scratch.bytes(name, num_bytes, self._sums.device).view(self._sums.dtype)


_NAMES: dict[Side, str] = {"left": "P", "right": "Q"}


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        copy_all_(to, source)
