"""Workers that come and go: those without the newest state take it from one that has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.sharded import local_values
from gradwire.training.fragments import broadcast, buckets_of
from gradwire.training.local_state import Turn
from gradwire.training.outer_loop import OuterLoop
from gradwire.training.site_call import MIXED


@dataclass(frozen=True)
class Position:
    """The place of a rank's state in the run."""

    num_steps: int
    turn: Turn

    def note(self) -> str:
        """Return a text that `newest` reads, the same on all ranks of a site."""
        return json.dumps({"num_steps": self.num_steps, "turn": replace(self.turn, work=()).save()})


@dataclass(frozen=True)
class Newest:
    """The newest state of all ranks."""

    position: Position
    source: int
    """The rank that has it, and that the others take it from."""
    is_current: bool
    """True if this rank has it too: averagings since would have moved it by as much."""


def newest(notes: Sequence[str], site: int) -> Newest | None:
    """Return the newest state; ``notes`` has every site's `Position.note`, or "" if it has no state.

    A state is newer if it has more averages; of those with as many, if it has more steps. A site whose ranks
    have different states has none. Raises ValueError if there is no other.
    """
    found: dict[int, Position] = {}
    for each, note in enumerate(notes):
        if note and note != MIXED:
            fields = json.loads(note)
            found[each] = Position(fields["num_steps"], Turn.read(fields["turn"]))
    if not found and MIXED in notes:
        raise ValueError(
            f"the ranks of site {notes.index(MIXED)} have states of different steps, and no site has a whole "
            "one: give all ranks states of one step, or None to begin anew"
        )
    if not found:
        return None
    source = max(found, key=lambda each: (*_averages(found[each]), found[each].num_steps, -each))
    is_current = site in found and _averages(found[site]) == _averages(found[source])
    return Newest(found[source], source, is_current)


def _averages(position: Position) -> tuple[int, int]:
    return position.turn.num_averages, position.turn.num_begun


def share_outer_state(loop: OuterLoop, group: dist.ProcessGroup, found: Newest, device: torch.device) -> None:
    """Replace the last average, the momentum and the means under way by the source's; collective.

    A rank without the newest state goes on from the last average.
    """
    for fragment in loop.fragments:
        tensors: list[Tensor] = fragment.wait() if fragment.is_under_way else []
        tensors += [bucket.start for bucket in fragment.buckets]
        tensors += [bucket.momentum for bucket in fragment.buckets if bucket.momentum is not None]
        for tensor in tensors:
            broadcast(tensor, group, found.source, device)
        if not found.is_current:
            for bucket in fragment.buckets:
                bucket.write_parameters()


@torch.no_grad()
def share_others(
    module: nn.Module,
    loop: OuterLoop | None,
    group: dist.ProcessGroup,
    found: Newest,
    device: torch.device,
) -> None:
    """Take the source's buffers, and its parameters that are not averaged; collective.

    Ranks that have the newest state keep their own.
    """
    averaged = {id(p) for bucket in buckets_of(loop.fragments if loop else []) for p in bucket.parameters}
    for tensor in [*(p for p in module.parameters() if id(p) not in averaged), *module.buffers()]:
        own = local_values(tensor)
        copy = own.clone()
        broadcast(copy, group, found.source, device)
        if not found.is_current:
            own.copy_(copy)
