"""The outer loop: fragments are averaged in turn, while the inner loop takes steps."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.averaging import Bucket
from gradwire.errors import Place, WireError, locate
from gradwire.peers import SealedClaim
from gradwire.sharded import local_values
from gradwire.training.finite_means import FiniteMeans, is_finite, looks_first
from gradwire.training.fragments import Fragment, require_same_parameters, tensors_of
from gradwire.training.inner_optimizer import InnerOptimizer
from gradwire.training.local_state import Turn
from gradwire.training.outer import DiLoCo
from gradwire.training.site_ranks import SiteRanks
from gradwire.training.turns import Turns, TurnsByTime

# The weight of a rank that has done nothing. Not 0, so that a mean over such ranks alone is defined.
_LEAST_WORK = 1e-6
# The time between two looks for the ranks that have not come.
_POLL_S = 0.005


class Averaging(Protocol):
    """Averages buckets over ranks; an `Engine` does."""

    @property
    def name(self) -> str: ...

    @property
    def failure(self) -> WireError | None: ...

    def start(self, bucket: Bucket, place: Place) -> Future[Tensor]:
        """Begin to average a bucket, and return a future of the result."""
        ...

    def fail(self, error: WireError) -> None:
        """Fail with ``error``, on every rank."""
        ...


@dataclass(frozen=True)
class Members:
    """The sites that average together, as a rank of one of them sees them."""

    averaging: Averaging
    ranks: SiteRanks
    """The ranks of this site."""
    name: str = ""
    """A name that the members share, and no others ever have."""


@dataclass(eq=False)
class OuterLoop:
    """Begin and end the averagings of fragments, in the same order on all ranks."""

    members: Members
    fragments: list[Fragment]
    turns: Turns
    streaming: DiLoCo
    """Its delay and alpha count here."""
    inner: InnerOptimizer
    weigh: bool = False
    """True to weigh each site by the work that it has done."""
    num_begun: int = 0
    """Averagings that have begun."""
    num_averages: int = 0
    """Averagings that have ended."""
    history: str = ""
    group: str = ""
    """Both as in `Turn`."""
    _means: FiniteMeans = field(default_factory=FiniteMeans, init=False)

    def begin_due(self, num_local: int, work: float, position: int) -> None:
        """Count a local step, and begin the averaging that is due after it.

        Args:
            num_local: the number of local steps so far.
            work: how much this step has done.
            position: the number of steps for errors and seeds, the same on all ranks.
        """
        self._raise_failure(may_ask=False)
        for fragment in self.fragments:
            fragment.work += work
            fragment.steps_left -= 1
        number = self.turns.due(num_local, self.members.ranks.any_of)
        if number is not None:
            self.begin(self.fragments[number], position, self.streaming.delay)

    def end_due(self) -> bool:
        """End the averagings whose delay is over; return True if there are any."""
        due = [each for each in self.fragments if each.is_under_way and each.steps_left <= 0]
        self._end(due, self.streaming.alpha)
        return bool(due)

    def begin(self, fragment: Fragment, position: int, delay: int, call: str | None = None) -> None:
        """Begin to average a fragment; first end its averaging that is under way, if there is one.

        On CPU, ranks compare the ``call`` that begins it, by default that of a step, and its number. Without
        this, a rank that averages alone would be averaged with later turns of the others.
        """
        self._require_finite_means(position)
        if fragment.is_under_way:  # by the clock, a turn may come before the delay is over
            self._end([fragment], self.streaming.alpha)
        require_same_parameters(self.fragments, self.inner.parameters())
        ranks, averaging = self.members.ranks, self.members.averaging
        weight = max(ranks.total(fragment.work), _LEAST_WORK) if self.weigh else None
        place = Place(ranks.rank, position, 0, averaging.name)
        claim = {
            "the call": call or f"step() at step {position}",
            "the averaging": f"number {self.num_begun}, of fragment {fragment.number}",
        }
        keeps_steps = self.streaming.keeps_steps
        fragment.begin(self._start, place, delay, weight, SealedClaim(claim), keeps_steps=keeps_steps)
        self.num_begun += 1
        self.group = self.members.name

    def _start(self, bucket: Bucket, place: Place) -> Future[Tensor]:
        """Begin to average a bucket; on CPU, fail on all ranks if this one's values are not finite."""
        averaging = self.members.averaging
        if looks_first(bucket.flat) and not is_finite(bucket.flat):
            name = next(slot.name for slot in bucket.layout.slots if not is_finite(slot.view(bucket.flat)))
            text = f"parameter {name!r} is not finite on this rank, so nothing is averaged"
            averaging.fail(locate(FloatingPointError(text), place))
        return averaging.start(bucket, place)

    def _require_finite_means(self, position: int) -> None:
        """Fail on all ranks if the means of the last averagings on a GPU were not finite."""
        if self._means.were_finite():
            return
        self._means.forget()
        named = (
            name
            for fragment in self.fragments
            for bucket in fragment.buckets
            for name, parameter, _ in bucket.places(bucket.start)
            if not is_finite(local_values(parameter))
        )
        name = next(named, None)
        where = "parameters of another rank are" if name is None else f"parameter {name!r} on this rank is"
        text = f"the last average is not finite, so it has changed nothing: {where} not finite"
        self._fail(FloatingPointError(text), position)
        self._raise_failure(may_ask=True)

    def catch_up(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Begin the averagings that other ranks have begun, by clocks ahead of this one's; collective.

        Raises `WireError` if a rank is lost.
        """
        if not isinstance(self.turns, TurnsByTime):
            return
        try:
            if device.type == "cpu":  # NCCL would take no turns while it waits
                self._take_turns_until_all_come(self.turns, group)
            most = torch.tensor(self.num_begun, device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
        except RuntimeError as error:
            self._give_up()
            raise self._fail(error, self.num_begun).with_traceback(error.__traceback__) from None
        while self.num_begun < int(most):
            self.begin(self.fragments[self.turns.take()], self.num_begun, self.streaming.delay)

    def _take_turns_until_all_come(self, turns: TurnsByTime, group: dist.ProcessGroup) -> None:
        """Wait for the other ranks, which may have steps to take and would wait for this one in a turn.

        A turn begins only if the one before of its fragment has its result, so nothing is waited for here:
        a rank that has come takes no turns. Ranks of one site decide together.
        """
        any_of = self.members.ranks.any_of
        # See Note [Groups by position].
        have_come = dist.all_reduce(torch.zeros(1), dist.ReduceOp.SUM, group, True)
        assert have_come is not None
        while any_of(not have_come.is_completed()):
            self._raise_failure(may_ask=False)
            fragment = self.fragments[turns.next_fragment]
            if any_of(turns.is_due) and not any_of(fragment.is_busy):
                turns.take()
                self.begin(fragment, self.num_begun, self.streaming.delay)
            time.sleep(_POLL_S)
        have_come.wait()

    def begin_all(self) -> None:
        """End what is under way, then begin to average all fragments, for `end_all` to end.

        Ranks may have taken different numbers of steps, so that their position is the number of averagings.
        """
        self._end([each for each in self.fragments if each.is_under_way], self.streaming.alpha)
        for fragment in self.fragments:
            self.begin(fragment, self.num_begun, 0, "average()")

    def end_all(self) -> None:
        """End what `begin_all` has begun: all ranks have the same parameters.

        If fragments have periods of their own, each is somewhere in it. So an outer step, whose momentum is
        meant for a whole period, would go too far: parameters become the plain mean.
        """
        self._end(self.fragments, 0.0, plainly=self.streaming.streams)
        self._require_finite_means(self.num_begun - 1)

    def save(self) -> tuple[Turn, dict[str, dict[str, Tensor]]]:
        """Return the place of this run, and the tensors that a checkpoint holds."""
        self.wait()  # first, as averagings may fail meanwhile
        turn, has_failed = self.turn, self.has_failed
        tensors = tensors_of(self.fragments, has_means=not has_failed)
        return replace(turn, under_way={}, group="") if has_failed else turn, tensors

    def settle(self) -> bool:
        """Wait for the averagings under way; forget them if one has failed on any rank of this site.

        Returns True if one has, or if the last average was not finite.
        """
        self.wait()
        has_failed = self._failure(may_ask=True) is not None or not self._means.were_finite()
        if has_failed:
            self._give_up()
            self._means.forget()
        return has_failed

    @property
    def has_failed(self) -> bool:
        """True if an averaging has failed here, or on another rank of the site and this one knows it.

        Also True if the last average was not finite, which raises when the next one begins.
        """
        failures = self.members.averaging.failure, self._failure(may_ask=False)
        return any(each is not None for each in failures) or not self._means.were_finite()

    @property
    def turn(self) -> Turn:
        """The place of this run between its averagings."""
        under_way = {each.number: each.steps_left for each in self.fragments if each.is_under_way}
        work = tuple(float(each.work) for each in self.fragments)
        group = self.group if under_way else ""
        return Turn(self.num_begun, self.num_averages, work, under_way, self.history, group)

    def go_on(self, turn: Turn) -> None:
        """Go on from ``turn``, whose means are to be loaded; ValueError if it has other fragments."""
        if turn.under_way and (
            len(turn.work) != len(self.fragments) or max(turn.under_way) >= len(self.fragments)
        ):
            raise ValueError(
                f"this state was saved during an averaging, with {len(turn.work)} fragments; there are "
                f"{len(self.fragments)} now. Load it with as many, or call average() before state_dict()"
            )
        for number, steps_left in turn.under_way.items():
            self.fragments[number].resume(steps_left, keeps_steps=self.streaming.keeps_steps)
        if len(turn.work) == len(self.fragments):
            for fragment, work in zip(self.fragments, turn.work, strict=True):
                fragment.work = work
        self.num_begun, self.num_averages = turn.num_begun, turn.num_averages
        self.history, self.group = turn.history, turn.group
        self.turns.restart(turn.num_begun)

    def wait(self) -> None:
        """Wait for the averagings under way, which still change residuals."""
        for fragment in self.fragments:
            fragment.wait()

    def _end(self, fragments: Sequence[Fragment], alpha: float, *, plainly: bool = False) -> None:
        """Wait for averagings, and move parameters by all of them, or raise and move none."""
        means = [fragment.wait() for fragment in fragments]
        self._raise_failure(may_ask=bool(fragments))
        applies = self._means.look([mean for own in means for mean in own], self.members.ranks)
        for fragment, mean in zip(fragments, means, strict=True):
            fragment.move(mean, self.inner.lr_of, alpha, plainly, applies)
            self.num_averages += 1
            self.note_group()

    def note_group(self) -> None:
        """Add the group to the history."""
        text = f"{self.history} {self.members.name}".encode()
        self.history = hashlib.blake2b(text, digest_size=8).hexdigest()

    def _raise_failure(self, *, may_ask: bool) -> None:
        """Raise the failure of any rank of this site, and forget the averagings under way.

        Ranks of a site that hold other shards average with other ranks, and may not have failed. All forget,
        so that shards stay those of one model. They are asked only if they all ``may_ask`` now.
        """
        failure = self._failure(may_ask=may_ask)
        if failure is not None:
            self._give_up()
            raise failure.with_traceback(None)

    def _fail(self, error: Exception, position: int) -> WireError:
        """Fail on every rank of this group; return the error with its place."""
        averaging = self.members.averaging
        located = locate(error, Place(self.members.ranks.rank, position, 0, averaging.name))
        averaging.fail(located)
        return located

    def _failure(self, *, may_ask: bool) -> WireError | None:
        return self.members.ranks.failure(self.members.averaging.failure, may_ask=may_ask)

    def _give_up(self) -> None:
        for fragment in self.fragments:
            fragment.give_up()
