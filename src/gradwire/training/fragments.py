"""Fragments: the parts of a model that local SGD averages in turn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from gradwire.averaging import Bucket, checkpoint
from gradwire.errors import Place
from gradwire.lanes import completed
from gradwire.peers import SealedClaim, all_gather_bytes
from gradwire.sharded import cut_like, shard_like
from gradwire.training.inner_optimizer import Numbered
from gradwire.training.outer import DiLoCo, Outer
from gradwire.training.parameter_buckets import MakesLayouts, ParameterBucket, runs_of

Start = Callable[[Bucket, Place], Future[Tensor]]
"""Begin to average a bucket; return a future of the result."""


class Fragment:
    """Parameters that are averaged together, in buckets. At most one averaging is under way."""

    def __init__(self, number: int, buckets: Sequence[ParameterBucket]) -> None:
        self.number = number
        self.buckets = list(buckets)
        self.steps_left = 0
        """Steps until the averaging under way is applied."""
        self.work = 0.0
        """This rank's work since the last averaging began."""
        self._futures: list[Future[Tensor]] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._futures is not None

    @property
    def is_busy(self) -> bool:
        """True if an averaging is under way that has no result yet."""
        return any(not future.done() for future in self._futures or ())

    def begin(
        self,
        start: Start,
        place: Place,
        delay: int,
        weight: float | None,
        claim: SealedClaim,
        *,
        keeps_steps: bool = False,
    ) -> None:
        """Begin to average how far ranks have moved, to be applied after ``delay`` steps.

        Ranks compare the ``claim`` with the first bucket, which stands for all. With ``keeps_steps``, the
        steps of the delay can be kept.
        """
        assert self._futures is None, "an averaging of this fragment is under way"
        self._futures = []
        for number, bucket in enumerate(self.buckets):
            compared = claim if number == 0 else None
            if keeps_steps and delay:
                bucket.note_parameters()
            own = replace(bucket.pseudo_gradient(), weight=weight, claim=compared)
            self._futures.append(start(own, replace(place, bucket=bucket.index)))
        self.steps_left, self.work = delay, 0.0

    def wait(self) -> list[Tensor]:
        """Wait for the averaging under way, and return the mean of each bucket; on CUDA, the stream waits."""
        return [future.wait() for future in self._futures or ()]

    def move(
        self,
        means: Sequence[Tensor],
        lr_of: Callable[[int], float],
        alpha: float,
        plainly: bool,
        applies: Tensor | None,
    ) -> None:
        """Move by the means, and end the averaging; ``lr_of`` has the learning rate of each param group.

        ``alpha``, ``plainly`` and ``applies`` are as for `ParameterBucket.move`.
        """
        for bucket, mean in zip(self.buckets, means, strict=True):
            bucket.move(mean, lr_of(bucket.param_group), alpha, plainly=plainly, applies=applies)
        self._futures = None

    def resume(self, steps_left: int, *, keeps_steps: bool = False) -> None:
        """Go on with an averaging; if it is not under way here, its means are zeros, to be loaded.

        With ``keeps_steps``, the steps from now on are kept, unless parameters of an earlier step are loaded.
        """
        self.steps_left = steps_left
        if self._futures is None:
            if keeps_steps:
                self.note_parameters()
            zeros = [torch.zeros_like(b.start, device=b.parameters[0].device) for b in self.buckets]
            self._futures = [completed(flat) for flat in zeros]

    def note_parameters(self) -> None:
        """Let the steps from now on be kept when the averaging under way ends."""
        for bucket in self.buckets:
            bucket.note_parameters()

    def give_up(self) -> None:
        """Forget the averaging under way, which has failed; this rank's movement is still to be averaged."""
        self._futures = None
        for bucket in self.buckets:
            bucket.begun = None


def make_fragments(
    parameters: Sequence[Numbered], layouts: MakesLayouts, outer: Outer | None, offload: bool = False
) -> list[Fragment]:
    """Return the fragments that ``outer`` asks for, of buckets with consecutive numbers.

    Raises ValueError if the parameters cannot be divided so.
    """
    fragments: list[Fragment] = []
    num_buckets = 0
    for number, own in enumerate(divided(parameters, layouts, outer)):
        runs = runs_of(own, layouts)
        buckets = [
            ParameterBucket(num_buckets + i, i == len(runs) - 1, run, layouts, outer, offload)
            for i, run in enumerate(runs)
        ]
        num_buckets += len(runs)
        fragments.append(Fragment(number, buckets))
    return fragments


def divided(
    parameters: Sequence[Numbered], layouts: MakesLayouts, outer: Outer | None
) -> list[list[Numbered]]:
    """Return the parameters of each fragment; ValueError if they cannot be divided as ``outer`` asks."""
    names = [slot.name for slot in layouts.make(0, torch.float32, [p for p, _ in parameters]).slots]
    if not isinstance(outer, DiLoCo):
        return [list(parameters)]
    by_name = dict(zip(names, parameters, strict=True))
    found = outer.divide({name: parameter.numel() for name, (parameter, _) in by_name.items()})
    return [[by_name[name] for name in own] for own in found]


def buckets_of(fragments: Iterable[Fragment]) -> list[ParameterBucket]:
    """Return the buckets of all fragments, in order."""
    return [bucket for fragment in fragments for bucket in fragment.buckets]


def require_same_parameters(fragments: Iterable[Fragment], parameters: Iterable[Numbered]) -> None:
    """Raise ValueError if the fragments do not have exactly these parameters."""
    own = {id(parameter) for bucket in buckets_of(fragments) for parameter in bucket.parameters}
    if own != {id(parameter) for parameter, _ in parameters}:
        raise ValueError(
            "the optimizer's parameters have changed since local SGD began; make a new LocalSGD after "
            "add_param_group or a change of requires_grad"
        )


def share_starts(fragments: Iterable[Fragment], group: dist.ProcessGroup, device: torch.device) -> None:
    """Let all ranks start from the parameters of rank 0; collective.

    Ranks that DDP has given the same parameters have them already. On a slow link it takes minutes to send
    them, so ranks compare digests first.
    """
    buckets = buckets_of(fragments)
    digests = [
        hashlib.blake2b(bucket.start.cpu().numpy().data, digest_size=16).digest() for bucket in buckets
    ]
    everyone = all_gather_bytes(b"".join(digests), group)
    for number, bucket in enumerate(buckets):
        place = slice(16 * number, 16 * (number + 1))
        if len({own[place] for own in everyone}) > 1:
            broadcast(bucket.start, group, 0, device)
            bucket.write_parameters()


def broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
    """Replace ``tensor`` by that of rank ``source`` of the group, by way of ``device``; collective."""
    there = tensor.to(device)
    dist.broadcast(there, None, group, group_src=source)  # see Note [Groups by position]
    if there is not tensor:
        tensor.copy_(there)


def tensors_of(fragments: Sequence[Fragment], *, has_means: bool = True) -> dict[str, dict[str, Tensor]]:
    """Return copies of what a checkpoint holds, by kind and parameter; waits for averagings under way.

    Those of a sharded model are shards, as in its own state. ``has_means`` is False if averagings under way
    have failed.
    """
    return {
        kind: {name: shard_like(parameter, view.clone()) for name, (parameter, view) in places.items()}
        for kind, places in _places(fragments, has_means=has_means).items()
    }


def load_tensors(fragments: Sequence[Fragment], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Load what `tensors_of` returned, or whole tensors; ValueError, with nothing changed, if it is unfit."""
    loads: list[tuple[Tensor, Tensor]] = []
    for kind, places in _places(fragments).items():
        tensors = checkpoint.require_tensors(kind, saved[kind])
        if kind == "begun" and not (places and tensors):
            continue  # saved without `keeps_steps`, or loaded without it
        different = places.keys() ^ tensors.keys()
        for name in places.keys() & tensors.keys():
            parameter, view = places[name]
            values = cut_like(parameter, tensors[name]) if tensors[name].shape == parameter.shape else None
            if values is None or values.shape != view.shape:
                different.add(name)
            else:
                loads.append((view, values))
        if different:
            raise ValueError(
                f"the {kind} of this state does not fit: it differs in {sorted(different)[:5]}; "
                "load what was saved with the same parameters, warmup_steps and kind of outer optimizer. On "
                "another number of shards, load what state_dict(gather=True) returned"
            )
    for view, values in loads:
        view.copy_(values)


def _places(
    fragments: Sequence[Fragment], *, has_means: bool = True
) -> dict[str, dict[str, tuple[nn.Parameter, Tensor]]]:
    """Return each parameter, and this rank's values of it, by kind and name."""
    buckets = buckets_of(fragments)
    if any(bucket.is_offloaded for bucket in buckets):
        torch.cuda.synchronize(buckets[0].parameters[0].device)  # copies to the host may be under way
    under_way = [each for each in fragments if each.is_under_way and has_means]
    flats = {
        "start": [(bucket, bucket.start) for bucket in buckets],
        "momentum": [(bucket, bucket.momentum) for bucket in buckets if bucket.momentum is not None],
        "mean": [pair for each in under_way for pair in zip(each.buckets, each.wait(), strict=True)],
        "begun": [(b, b.begun) for each in under_way for b in each.buckets if b.begun is not None],
    }
    return {
        kind: {n: (parameter, view) for bucket, flat in own for n, parameter, view in bucket.places(flat)}
        for kind, own in flats.items()
    }
