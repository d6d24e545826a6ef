"""One step of low-rank averaging: the factors of one bucket's matrices, found in one round or two."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from gradwire import ops
from gradwire.buckets import BucketLayout
from gradwire.codecs import Codec, Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.factors import FactorPart, Which, factor_part
from gradwire.exchanges.matrices import MatrixPlan
from gradwire.exchanges.one_shot import encoded_bytes, one_round_pays
from gradwire.exchanges.residuals import migrate_residuals
from gradwire.exchanges.rounds import Round, Rounds
from gradwire.exchanges.scatter import Sum
from gradwire.exchanges.two_phase import seeds_of
from gradwire.ops import OTHER, Seed, Side
from gradwire.torch_private import copy_all_

_NAMES: dict[Side, str] = {"left": "P", "right": "Q"}


@dataclass(frozen=True)
class LowRankStep:
    """The averaging of one bucket in one step that compresses; see `LowRank` for what it does."""

    plan: MatrixPlan
    flat: Tensor
    sums: Tensor
    """The matrices: gradients, to which residuals are added in place."""
    context: Context
    sides: Sequence[Side]
    """The factors to compute, one in each round."""
    encodings: Sequence[tuple[Codec, Which]]
    """The encodings of a factor, each with the vectors that it is for; none to send factors as they are."""
    feedback: bool
    warm_start: bool
    seed: int

    @property
    def _kernels(self) -> ModuleType:
        return ops.low_rank(self.flat, self.sums)

    def rounds(self) -> Rounds:
        """Replace the bucket's values by the average of all ranks'."""
        batches, side = self.plan.batches, self.sides[0]
        basis = self._start(OTHER[side])
        factor, own, votes = yield from self._find_first(side, basis)
        if len(self.sides) == 2:
            self._kernels.orthogonalize(batches, side, factor, None)
            side, basis = self.sides[1], factor
            factor, own = yield from self._find_second(basis)
        kept = self._remembered(side) if self.warm_start else None
        self._kernels.judge(batches, side, factor, votes, kept)
        sums = self.sums if self.feedback else None
        means, owns = ((factor, basis), (own, basis)) if side == "left" else ((basis, factor), (basis, own))
        self._kernels.finish(batches, self.flat, sums, *means, *owns, votes)

    def _start(self, side: Side) -> Tensor:
        """Return an orthonormal basis to start from: the step before's, or random where there is none."""
        dtype, device = self.sums.dtype, self.sums.device
        if self.warm_start:
            basis = self._remembered(side)
            key = self._layout(side), dtype, device, self.seed
            spare = self.context.memory.cached(key, self.context.step, lambda: self._draw(side, 0))
        else:
            basis, spare = self._draw(side, self.context.step), None
        self._kernels.orthogonalize(self.plan.batches, side, basis, spare)
        return basis

    def _draw(self, side: Side, step: int) -> Tensor:
        """Return random numbers that depend on seed, parameter and step, not on the bucket."""
        layout = self._layout(side)
        flat = torch.empty(layout.numel, dtype=self.sums.dtype, device=self.sums.device)
        # Not by a generator of torch: its numbers differ between kinds of CPUs and of GPUs.
        for slot in layout.slots:
            values = flat[slot.offset : slot.offset + slot.numel]
            ops.fill_uniformly(values, Seed.of(self.seed, step, slot.name))
        return flat

    def _find_first(self, side: Side, basis: Tensor) -> Generator[Round, None, tuple[Tensor, Tensor, Tensor]]:
        """Compute a factor with the first message; return its sum, this rank's own share, and the votes."""
        plan, kernels = self.plan, self._kernels
        sizes = [self._layout(side).numel, plan.num_matrices, plan.num_plain]
        message = self._scratch("first", sum(sizes))
        factor, votes, plain = message.split(sizes)
        find = kernels.accumulate_and_project if side == "left" else kernels.accumulate_and_project_back
        find(plan.batches, self.flat, self.sums, votes, basis, factor)
        outside, inside = self._runs(plain)
        _copy(outside, inside)
        yield from migrate_residuals(plain, replace(self.context, layout=plan.plain), None)
        # With two rounds, the first factor is only the basis of the second: its own share is not needed.
        own = None if len(self.sides) == 2 else self._scratch("own", factor.numel())
        yield from self._sum(side, factor, own, message)
        _copy(inside, outside)
        return factor, factor if own is None else own, votes

    def _find_second(self, left: Tensor) -> Generator[Round, None, tuple[Tensor, Tensor]]:
        """Compute the right factor; return its sum over ranks, and this rank's own share."""
        factor = self._scratch("second", self.plan.right.numel)
        self._kernels.project_back(self.plan.batches, self.sums, left, factor)
        own = self._scratch("own", factor.numel())
        yield from self._sum("right", factor, own, factor)
        return factor, own

    def _sum(self, side: Side, factor: Tensor, own: Tensor | None, message: Tensor) -> Rounds:
        """Sum a message that begins with a factor; ``own`` becomes this rank's share of that factor."""
        if not self.encodings:
            if own is not None:
                own.copy_(factor)
            yield (Sum(message),)
            return
        rest = message[factor.numel() :]
        exact = Raw(rest.dtype)  # a codec that changes nothing, so that the rest travels with the factor
        parts = self._parts(side, factor, "part")
        shares = [] if own is None else self._parts(side, own, "own part")
        shapes = [(part.codec, part.values.numel()) for part in parts]
        in_one_round = message_rounds([*shapes, (exact, rest.numel())], self.context.group.size) == 1
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
        seeds = seeds_of(part.codec, self.seed, self.context)
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
                self.plan.batches,
                side,
                lambda kind, numel: self._scratch(f"{name} {kind}", numel),
            )
            for codec, which in self.encodings
        ]

    def _runs(self, plain: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the uncompressed values: their places in the message, and those in the bucket."""
        outside, inside, position = [], [], 0
        for start, end in self.plan.runs:
            outside.append(plain[position : position + end - start])
            inside.append(self.flat[start:end])
            position += end - start
        return outside, inside

    def _remembered(self, side: Side) -> Tensor:
        memory, layout = self.context.memory, self._layout(side)
        # An earlier recipe may have left factors of another rank (width), which cannot be started from.
        return memory.flat(_NAMES[side], layout, self.sums.dtype, self.sums.device, may_change=True)

    def _layout(self, side: Side) -> BucketLayout:
        return self.plan.left if side == "left" else self.plan.right

    def _scratch(self, name: str, numel: int) -> Tensor:
        num_bytes = numel * self.sums.dtype.itemsize
        return self.context.scratch.bytes(name, num_bytes, self.sums.device).view(self.sums.dtype)


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        copy_all_(to, source)


def message_rounds(message: Sequence[tuple[Codec, int]], world_size: int) -> int:
    """Return 1 if ranks send each other all of a message, 2 if each sums a part and passes that on."""
    return 1 if one_round_pays(encoded_bytes(message), world_size) else 2
