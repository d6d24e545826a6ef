"""Low-rank averaging: matrices of gradients travel as two thin factors (PowerSGD, ACP-SGD)."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradwire import ops
from gradwire.buckets import BucketLayout
from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.handover import take_over_residuals
from gradwire.exchanges.links import Links
from gradwire.exchanges.matrices import Plan, plan_of
from gradwire.exchanges.one_shot import one_round_pays, sum_bytes
from gradwire.exchanges.rounds import Round, Rounds
from gradwire.exchanges.skipped import mask_of_skipped, skipped_parameters
from gradwire.exchanges.two_phase import Sum, two_shot_bytes
from gradwire.exchanges.two_shot import PLAIN
from gradwire.ops import OTHER, Side


@dataclass(frozen=True)
class LowRank:
    """Average a bucket's matrices M as ``P.T @ Q``, with P of shape (rank, rows) and Q (rank, columns).

    With two rounds (PowerSGD, Vogels et al., arXiv:1905.13727): ``P = orthogonalize(sum of Q @ M.T)`` with
    the Q of the step before, then ``Q = sum of P @ M``. With one (ACP-SGD, Zhang et al., arXiv:2302.06488)
    the sides take turns: in even steps Q is found with the P of the step before, in odd ones P with Q.
    What does not pay to compress goes along in the first message, as it is.

    Note [One pass of sums]: with feedback, M is the residual with the gradient added to it, in place, and
    the residual is M less ``P.T @ Q`` of this rank's own factors: what this rank alone has left out. The
    mean of that is what the mean has left out, so results are those of residuals taken against the mean,
    but these stay bounded, where the others gather the differences between ranks without end.

    Note [Steps that do not count]: with the first message, each rank votes on each matrix: 0 if its gradient
    is zero, 1 if not, NaN if it is not finite. So a matrix whose gradient is not finite on some rank is NaN
    on all. One whose gradient is zero on every rank is zero: DDP drops what becomes of a parameter that no
    rank has used. Of both, the residual and the warm start are as they were before the step.
    """

    rank: int = 4
    start: int = 0
    """The first step that compresses; those before it average plainly."""
    min_compression_rate: float = 2.0
    """A matrix is compressed if that makes it smaller by more than this factor."""
    feedback: bool = True
    """Whether what a step leaves out is added to the next."""
    warm_start: bool = True
    """Whether a step's factors are where the next one starts; else that is random."""
    seed: int = 0
    whole: bool = False
    """One matrix for all of a bucket, instead of one for each parameter."""
    num_rounds: Literal[1, 2] = 2
    factors: Codec | None = None
    """What factors travel as, if not as they are; those of fp64 buckets always do."""

    communicates = True

    @property
    def kernels(self) -> frozenset[ops.Family]:
        own: frozenset[ops.Family] = frozenset({"casts", "low_rank"})
        return own if self.factors is None else own | self.factors.kernels

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
            raise ValueError("one round starts where the step before ended: it needs its warm start")
        if self.factors is not None and self.factors.stochastic:
            raise ValueError(f"factors are rounded to the nearest value, unlike those of {self.factors}")

    def plan(self, layout: BucketLayout) -> Plan:
        """What becomes of each value of a bucket."""
        codec = self._codec(layout.dtype)
        share = 1.0 if codec is None else codec.wire_bytes(1 << 10) / (4 << 10)
        return plan_of(layout, self.rank, self.min_compression_rate * share, self.whole)

    def _codec(self, dtype: torch.dtype) -> Codec | None:
        """What factors of a bucket of this dtype travel as."""
        if self.factors is None or _work(dtype) != torch.float32:
            return None
        return self.factors.resolve(torch.float32)

    def rounds(self, flat: Tensor, context: Context) -> Rounds:
        plan = self.plan(context.layout)
        if context.group.size == 1 or self._is_plain(context.layout, context.step):
            yield from PLAIN.rounds(flat, context)
            return
        work = _work(flat.dtype)
        compressed = replace(context, layout=plan.sums)
        if self.feedback:
            yield from take_over_residuals(flat, compressed, work)
            sums = context.memory.flat("residual", plan.sums, work, flat.device)
        else:
            num_bytes = plan.sums.numel * work.itemsize
            sums = context.scratch.bytes("sums", num_bytes, flat.device).view(work).zero_()
            yield from take_over_residuals(sums, compressed, None)
        may_skip = self.whole and self.feedback and context.may_skip
        mask = (yield from mask_of_skipped(flat, context)) if may_skip else None
        with skipped_parameters(mask, flat, sums):
            yield from _Averaging(self, plan, flat, sums, context).rounds()

    def shared_bytes(self, layout: BucketLayout, step: int) -> int:
        if self._is_plain(layout, step):
            return PLAIN.shared_bytes(layout, step)
        work = _work(layout.dtype)
        return sum((codec or Raw(work)).wire_bytes(numel) for codec, numel in self._sums(layout, step))

    def link_bytes(self, layout: BucketLayout, world_size: int, step: int) -> list[Links]:
        if self._is_plain(layout, step):
            return PLAIN.link_bytes(layout, world_size, step)
        work = _work(layout.dtype)
        sums = [
            sum_bytes(numel, work, world_size) if codec is None else two_shot_bytes(codec, numel, world_size)
            for codec, numel in self._sums(layout, step)
        ]
        return [Links(0, sum(sent)) for sent in zip(*sums, strict=True)]

    def link_rounds(self, layout: BucketLayout, world_size: int, step: int) -> Links:
        if self._is_plain(layout, step):
            return PLAIN.link_rounds(layout, world_size, step)
        size, sums = _work(layout.dtype).itemsize, self._sums(layout, step)
        once = [codec is None and one_round_pays(numel * size, world_size) for codec, numel in sums]
        return Links(0, sum(1 if each else 2 for each in once))

    def _is_plain(self, layout: BucketLayout, step: int) -> bool:
        """Whether nothing of a bucket is compressed."""
        return step < self.start or layout.dtype.is_complex or not self.plan(layout).batches

    def _sums(self, layout: BucketLayout, step: int) -> list[tuple[Codec | None, int]]:
        """Of each sum over ranks in a step that compresses, what it travels as, and of how many values."""
        plan, codec = self.plan(layout), self._codec(layout.dtype)
        left, right, rest = plan.left.numel, plan.right.numel, plan.num_matrices + plan.num_plain
        factors = [left, right] if self.num_rounds == 2 else [left if self._found(step) == "left" else right]
        if codec is not None:
            return [(None, rest), *((codec, factor) for factor in factors)]
        factors[0] += rest
        return [(None, factor) for factor in factors]

    def _found(self, step: int) -> Side:
        """With one round, the side that this step finds."""
        return "left" if step % 2 else "right"


def _work(dtype: torch.dtype) -> torch.dtype:
    """At least fp32: whatever the bucket is, products and residuals are not rounded to 16 bits."""
    return torch.promote_types(dtype, torch.float32)


class _Averaging:
    """One bucket in one step."""

    def __init__(self, options: LowRank, plan: Plan, flat: Tensor, sums: Tensor, context: Context) -> None:
        self._options = options
        self._plan = plan
        self._flat = flat
        self._sums = sums
        self._context = context
        self._kernels = ops.low_rank(flat, sums)
        self._codec = options._codec(flat.dtype)

    def rounds(self) -> Rounds:
        batches = self._plan.batches
        side = self._options._found(self._context.step) if self._options.num_rounds == 1 else "left"
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
        """An orthonormal basis to start from: that of the step before, and chance where there is none."""
        options, dtype, device = self._options, self._sums.dtype, self._sums.device
        if options.warm_start:
            basis = self._remembered(side)
            key = self._layout(side), dtype, device, options.seed
            spare = self._context.memory.cached(key, lambda: self._draw(side, 0))
        else:
            basis, spare = self._draw(side, self._context.step), None
        self._kernels.orthogonalize(self._plan.batches, side, basis, spare)
        return basis

    def _draw(self, side: Side, step: int) -> Tensor:
        """Normal numbers that depend on the seed, the parameter and the step, not on the bucket."""
        layout = self._layout(side)
        flat = torch.empty(layout.numel, dtype=self._sums.dtype, device=self._sums.device)
        generator = torch.Generator(flat.device)
        for slot in layout.slots:
            words = f"{self._options.seed} {step} {slot.name}".encode()
            digest = hashlib.blake2b(words, digest_size=7).digest()
            generator.manual_seed(int.from_bytes(digest, "little"))
            flat[slot.offset : slot.offset + slot.numel].normal_(generator=generator)
        return flat

    def _find_first(self, side: Side, basis: Tensor) -> Generator[Round, None, tuple[Tensor, Tensor, Tensor]]:
        """The factor of this side, of all ranks and of this one, and the votes; sends the rest too."""
        plan, kernels = self._plan, self._kernels
        sizes = [self._layout(side).numel, plan.num_matrices, plan.num_plain]
        message = self._scratch("first", sum(sizes))
        factor, votes, plain = message.split(sizes)
        find = kernels.accumulate_and_project if side == "left" else kernels.accumulate_and_project_back
        find(plan.batches, self._flat, self._sums, votes, basis, factor)
        outside, inside = self._runs(plain)
        _copy(outside, inside)
        yield from take_over_residuals(plain, replace(self._context, layout=plan.plain), None)
        # In two rounds, what is found first is but where the second begins.
        own = None if self._options.num_rounds == 2 else self._scratch("own", factor.numel())
        yield from self._sum(factor, own, message)
        _copy(inside, outside)
        return factor, factor if own is None else own, votes

    def _find_second(self, left: Tensor) -> Generator[Round, None, tuple[Tensor, Tensor]]:
        """The right factor, of all ranks together and of this one."""
        factor = self._scratch("second", self._plan.right.numel)
        self._kernels.project_back(self._plan.batches, self._sums, left, factor)
        own = self._scratch("own", factor.numel())
        yield from self._sum(factor, own, factor)
        return factor, own

    def _sum(self, factor: Tensor, own: Tensor | None, message: Tensor) -> Rounds:
        """Sum a message that begins with a factor; ``own`` becomes what this rank has given to the factor."""
        if own is not None:
            own.copy_(factor)
        if self._codec is None:
            yield (Sum(message),)
            return
        left_out = None if own is None else self._scratch("left out", factor.numel()).zero_()
        yield Sum(factor, self._codec, left_out), Sum(message[factor.numel() :])
        if own is not None and left_out is not None:
            own.sub_(left_out)

    def _runs(self, plain: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What is sent as it is, in the message and in the bucket."""
        outside, inside, position = [], [], 0
        for start, end in self._plan.runs:
            outside.append(plain[position : position + end - start])
            inside.append(self._flat[start:end])
            position += end - start
        return outside, inside

    def _remembered(self, side: Side) -> Tensor:
        memory, layout = self._context.memory, self._layout(side)
        # Factors of another rank, of the recipe before this one, are no place to start from.
        return memory.flat(_NAMES[side], layout, self._sums.dtype, self._sums.device, may_change=True)

    def _layout(self, side: Side) -> BucketLayout:
        return self._plan.left if side == "left" else self._plan.right

    def _scratch(self, name: str, numel: int) -> Tensor:
        num_bytes = numel * self._sums.dtype.itemsize
        return self._context.scratch.bytes(name, num_bytes, self._sums.device).view(self._sums.dtype)


_NAMES: dict[Side, str] = {"left": "P", "right": "Q"}


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)
