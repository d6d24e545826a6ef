"""Low-rank averaging: matrices of gradients travel as two thin factors (PowerSGD, ACP-SGD)."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradwire import ops
from gradwire.codecs import Raw
from gradwire.exchanges.context import Context
from gradwire.exchanges.matrices import Batch, Plan, plan_of
from gradwire.exchanges.one_shot import one_round_pays, sum_bytes, sum_values
from gradwire.exchanges.skipped import skipped_parameters
from gradwire.exchanges.two_shot import TwoShot
from gradwire.layout import BucketLayout, Slot

_PLAIN = TwoShot(Raw())

Side = Literal["left", "right"]


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

    Note [Steps that do not count]: a matrix whose gradient is not finite on some rank is NaN on all, since
    NaN in the factors of one rank is NaN in the sum. One whose gradient is zero on every rank is zero:
    DDP drops what becomes of a parameter that no rank has used. Of both, the residual and the warm start are
    as they were before the step.
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

    communicates = True
    kernels: ClassVar[frozenset[ops.Family]] = frozenset({"casts", "low_rank"})

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start", 0), ("min_compression_rate", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.num_rounds == 1 and not self.warm_start:
            raise ValueError("one round starts where the step before ended: it needs its warm start")

    def plan(self, layout: BucketLayout) -> Plan:
        """What becomes of each value of a bucket."""
        return plan_of(layout, self.rank, self.min_compression_rate, self.whole)

    def run(self, flat: Tensor, context: Context) -> None:
        plan = self.plan(context.layout)
        compresses = context.step >= self.start and not flat.is_complex() and context.group.size > 1
        if not compresses or not plan.batches:
            _PLAIN.run(flat, context)
            return
        # At least fp32: whatever the bucket is, products and residuals are not rounded to 16 bits.
        work = torch.promote_types(flat.dtype, torch.float32)
        if self.feedback:
            sums = context.memory.flat("residual", plan.sums, work, flat.device)
        else:
            num_bytes = plan.sums.numel * work.itemsize
            sums = context.scratch.bytes("sums", num_bytes, flat.device).view(work).zero_()
        skipping = (
            skipped_parameters(flat, sums, context)
            if self.whole and self.feedback and context.may_skip
            else contextlib.nullcontext()
        )
        with skipping:
            _Averaging(self, plan, flat, sums, context).run()

    def wire_bytes(self, numel: int, dtype: torch.dtype, rank: int, world_size: int) -> int:
        """For a bucket that holds one vector; what others send depends on shapes: see `bucket_bytes`."""
        vector = Slot("", 0, torch.Size([numel]), (1,))
        return self.bucket_bytes(BucketLayout(0, dtype, (vector,)), rank, world_size)

    def bucket_bytes(self, layout: BucketLayout, rank: int, world_size: int, step: int | None = None) -> int:
        """The exact number of bytes this rank sends for a bucket, by default in a step that compresses."""
        plan, work = self.plan(layout), torch.promote_types(layout.dtype, torch.float32)
        if world_size == 1:
            return 0
        if not plan.batches or (step is not None and step < self.start) or layout.dtype.is_complex:
            return _PLAIN.wire_bytes(layout.numel, layout.dtype, rank, world_size)
        sums = self._num_summed(plan, step or 0)
        return sum(sum_bytes(numel, work, rank, world_size) for numel in sums)

    def bucket_rounds(self, layout: BucketLayout, world_size: int, step: int | None = None) -> int:
        """How many messages this rank sends to each other rank, by default in a step that compresses."""
        plan, work = self.plan(layout), torch.promote_types(layout.dtype, torch.float32)
        if not plan.batches or (step is not None and step < self.start) or layout.dtype.is_complex:
            return 2
        sums = self._num_summed(plan, step or 0)
        return sum(1 if one_round_pays(numel * work.itemsize, world_size) else 2 for numel in sums)

    def _num_summed(self, plan: Plan, step: int) -> list[int]:
        """How many values each sum over ranks has, in a step that compresses."""
        extra = plan.num_matrices + plan.num_plain
        if self.num_rounds == 2:
            return [plan.left.numel + extra, plan.right.numel]
        found = plan.left if self._found(step) == "left" else plan.right
        return [found.numel + extra]

    def _found(self, step: int) -> Side:
        """With one round, the side that this step finds."""
        return "left" if step % 2 else "right"


class _Averaging:
    """One bucket in one step."""

    def __init__(self, options: LowRank, plan: Plan, flat: Tensor, sums: Tensor, context: Context) -> None:
        self._options = options
        self._plan = plan
        self._flat = flat
        self._sums = sums
        self._context = context
        self._kernels = ops.low_rank(flat, sums)
        self._values = [matrix.view(flat) for matrix in plan.matrices]
        self._totals = [m for batch in plan.batches for m in batch.sums(sums)]

    def run(self) -> None:
        if self._options.num_rounds == 1 and self._options._found(self._context.step) == "right":
            left = self._start("left")
            right, own_right, votes = self._find("right", left, first=True)
            self._finish(left, right, left, own_right, votes, "right")
            return
        right = self._start("right")
        left, own_left, votes = self._find("left", right, first=True)
        if self._options.num_rounds == 1:
            self._finish(left, right, own_left, right, votes, "left")
            return
        for batch in self._plan.batches:
            self._kernels.orthogonalize(batch.left(left), None)
        right, own_right, _ = self._find("right", left, first=False)
        self._finish(left, right, left, own_right, votes, "right")

    def _start(self, side: Side) -> Tensor:
        """An orthonormal basis to start from: that of the step before, and chance where there is none."""
        layout, options = self._layout(side), self._options
        dtype, device, memory = self._sums.dtype, self._sums.device, self._context.memory
        if options.warm_start:
            basis = self._remembered(side)
            spare = memory.once((layout, dtype, device, options.seed), lambda: self._draw(layout, 0))
        else:
            basis, spare = self._draw(layout, self._context.step), None
        for batch in self._plan.batches:
            part = getattr(batch, side)
            self._kernels.orthogonalize(part(basis), None if spare is None else part(spare))
        return basis

    def _draw(self, layout: BucketLayout, step: int) -> Tensor:
        """Normal numbers that depend on the seed, the parameter and the step, not on the bucket."""
        flat = torch.empty(layout.numel, dtype=self._sums.dtype, device=self._sums.device)
        generator = torch.Generator(flat.device)
        for slot in layout.slots:
            words = f"{self._options.seed} {step} {slot.name}".encode()
            digest = hashlib.blake2b(words, digest_size=7).digest()
            generator.manual_seed(int.from_bytes(digest, "little"))
            flat[slot.offset : slot.offset + slot.numel].normal_(generator=generator)
        return flat

    def _find(self, side: Side, basis: Tensor, *, first: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The factor of this side: of all ranks together and of this one; the first also sends the rest."""
        layout, other = self._layout(side), _OTHER[side]
        num_matrices = self._plan.num_matrices if first else 0
        num_plain = self._plan.num_plain if first else 0
        message = self._scratch(f"message {side}", layout.numel + num_matrices + num_plain)
        factor, votes, plain = message.split([layout.numel, num_matrices, num_plain])
        if first:
            _copy_runs(self._flat, plain, self._plan.runs, to_bucket=False)
        for batch in self._plan.batches:
            found, known = getattr(batch, side)(factor), getattr(batch, other)(basis)
            values, sums, largest = self._values[batch.slice], batch.sums(self._sums), votes[batch.slice]
            if side == "left":
                self._kernels.accumulate_and_project(values, sums, largest, known, found)
            else:
                if first:
                    self._kernels.accumulate(values, list(sums), largest)
                self._kernels.project_back(sums, known, found)
            if first:  # NaN if the gradient is not finite, else 0
                found.add_((largest * 0).view(-1, 1, 1))
        if first:
            votes.copy_(votes != 0)
        own = self._scratch(f"own {side}", layout.numel).copy_(factor)
        sum_values(message, self._context)
        if first:
            _copy_runs(self._flat, plain, self._plan.runs, to_bucket=True)
        return factor, own, votes

    def _finish(
        self, left: Tensor, right: Tensor, own_left: Tensor, own_right: Tensor, votes: Tensor, found: Side
    ) -> None:
        """Write the product to the bucket, take this rank's own from the sums, and keep what was found."""
        batches, factor = self._plan.batches, left if found == "left" else right
        own, basis = (own_left, own_right) if found == "left" else (own_right, own_left)
        parts = [getattr(batch, found) for batch in batches]
        finite = torch.cat([(part(factor) * 0).sum((1, 2)) == 0 for part in parts])
        counts = finite & (votes != 0)
        # On CUDA, looking would wait for the device.
        some_do_not_count = factor.is_cuda or not bool(counts.all())
        if some_do_not_count:
            for k, (value, total) in enumerate(zip(self._values, self._totals, strict=True)):
                total.addcmul_(value.to(total.dtype), (~counts[k]).to(total.dtype), value=-1)
        if self._options.warm_start:
            kept = self._remembered(found)
            for part, batch in zip(parts, batches, strict=True):
                torch.where(_each(counts, batch), part(factor), part(kept), out=part(kept))
        for part, batch in zip(parts, batches, strict=True):
            if some_do_not_count:
                part(factor).masked_fill_(_each(finite & ~counts, batch), 0)
                part(own).masked_fill_(_each(~counts, batch), 0)
                getattr(batch, _OTHER[found])(basis).nan_to_num_(0.0)
            self._kernels.multiply(batch.left(left), batch.right(right), self._values[batch.slice])
            if self._options.feedback:
                self._kernels.subtract(batch.sums(self._sums), batch.left(own_left), batch.right(own_right))

    def _remembered(self, side: Side) -> Tensor:
        memory, layout = self._context.memory, self._layout(side)
        return memory.flat(_NAMES[side], layout, self._sums.dtype, self._sums.device)

    def _layout(self, side: Side) -> BucketLayout:
        return self._plan.left if side == "left" else self._plan.right

    def _scratch(self, name: str, numel: int) -> Tensor:
        num_bytes = numel * self._sums.dtype.itemsize
        return self._context.scratch.bytes(name, num_bytes, self._sums.device).view(self._sums.dtype)


_NAMES = {"left": "P", "right": "Q"}
_OTHER: dict[Side, Side] = {"left": "right", "right": "left"}


def _each(flags: Tensor, batch: Batch) -> Tensor:
    """One flag for each matrix of a batch, against its factors."""
    return flags[batch.slice].view(-1, 1, 1)


def _copy_runs(flat: Tensor, packed: Tensor, runs: tuple[tuple[int, int], ...], *, to_bucket: bool) -> None:
    """Between a bucket and the values of it that are sent as they are, one after the other."""
    position = 0
    for start, end in runs:
        inside, outside = flat[start:end], packed[position : position + end - start]
        if to_bucket:
            inside.copy_(outside)
        else:
            outside.copy_(inside)
        position += end - start
