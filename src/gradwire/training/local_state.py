"""The state of `LocalSGD` as plain tensors and numbers, and checks of one that is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.averaging import Grid, checkpoint
from gradwire.training.sites import Site


@dataclass(frozen=True)
class Turn:
    """The place of a run between its averagings."""

    num_begun: int = 0
    """Averagings that have begun; the same on all ranks."""
    num_averages: int = 0
    """Averagings that have ended."""
    work: tuple[float, ...] = ()
    """This rank's work since the last averaging of each fragment began."""
    under_way: dict[int, int] = field(default_factory=dict)
    """The steps left to each averaging under way, by the number of its fragment."""
    history: str = ""
    """A digest of the groups in which averagings have ended: the same on all ranks that took part in them."""
    group: str = ""
    """The name of the group in which the newest averaging under way has begun; empty if there is none."""

    @property
    def num_given_up(self) -> int:
        """Averagings that have begun and failed."""
        return self.num_begun - self.num_averages - len(self.under_way)

    @classmethod
    def read(cls, saved: object) -> Turn:
        """Return what `save` returned; ValueError or TypeError if this is something else."""
        if not isinstance(saved, Mapping):
            raise TypeError(f"'turn' of a state of LocalSGD is a mapping, not {saved!r:.80}")
        for key in ("num_begun", "num_averages", "work", "under_way"):
            if key not in saved:
                raise ValueError(f"this is no state of a LocalSGD: its 'turn' has no {key!r}")
        if unknown := [key for key in saved if key not in cls.__annotations__]:
            raise ValueError(f"'turn' of this state has {unknown[0]!r}, which is unknown")
        work, under_way = saved["work"], saved["under_way"]
        history = saved.get("history", "")  # older states have none, and no group
        if not isinstance(history, str) or not re.fullmatch("([0-9a-f]{16})?", history):
            raise ValueError(f"'history' of this state is 16 hexadecimal digits, not {history!r:.80}")
        group = saved.get("group", "")
        if not isinstance(group, str):
            raise ValueError(f"'group' of this state is a text, not {group!r:.80}")
        if not isinstance(work, list) or not all(
            type(each) is float and 0 <= each < math.inf for each in work
        ):
            raise ValueError(f"'work' of this state is a list of finite numbers, not {work!r:.80}")
        if not isinstance(under_way, list) or not all(isinstance(e, list) and len(e) == 2 for e in under_way):
            raise ValueError(f"'under_way' of this state is a list of pairs, not {under_way!r:.80}")
        counts = [
            (checkpoint.require_count("under_way", number), checkpoint.require_count("under_way", left))
            for number, left in under_way
        ]
        if group and not under_way:
            raise ValueError(f"'group' of this state is empty, as nothing is under way, not {group!r:.80}")
        return cls(
            checkpoint.require_count("num_begun", saved["num_begun"]),
            checkpoint.require_count("num_averages", saved["num_averages"]),
            tuple(work),
            dict(counts),
            history,
            group,
        )

    def claim(self) -> dict[str, str]:
        """Return what must be the same on all ranks that load a state."""
        return {
            "the saved number of averagings": f"{self.num_averages} of {self.num_begun} begun",
            "the history of averagings": self.history,
            "the group of averagings under way": self.group,
        }

    def save(self) -> dict[str, Any]:
        """Return lists, numbers and a text."""
        return {
            "num_begun": self.num_begun,
            "num_averages": self.num_averages,
            "work": list(self.work),
            "under_way": [list(pair) for pair in self.under_way.items()],
            "history": self.history,
            "group": self.group,
        }


def require_keys(state: object) -> int:
    """Return the step of a state; ValueError or TypeError if it is not that of a LocalSGD."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state of LocalSGD is a mapping, not {type(state).__name__}")
    for key in ("num_steps", "start", "momentum", "averaging", "wire"):
        if key not in state:
            raise ValueError(f"this is no state of a LocalSGD: it has no {key!r}")
    return checkpoint.require_count("num_steps", state["num_steps"])


def require_all_ranks(key: str, part: object, grid: Grid) -> None:
    """Raise ValueError if a part was saved on other ranks and lacks the residuals of one."""
    fields = checkpoint.check_fields(part)
    saved, there = fields.grid, [fields.grid.name(rank) for rank in fields.memory]
    if fields.entries and saved != grid and len(there) < saved.world_size:
        raise ValueError(
            f"this state was saved on {saved.world_size} ranks and this group has {grid.world_size}, but its "
            f"{key!r} has only the residuals of {', '.join(there)}: put gradwire.merge_state_dicts of every "
            f"rank's {key!r} there, or save what state_dict(gather=True) returns"
        )


def read_parts(state: Mapping[str, Any], site: Site) -> tuple[checkpoint.States, checkpoint.Saved]:
    """Return this rank's residuals and the wire's state; ValueError or TypeError if they do not fit."""
    for key in ("averaging", "wire"):
        require_all_ranks(key, state[key], site.grid)
    # The wire will check its state too, but by then a new wire may have replaced the old one.
    return site.read(state["averaging"]).memory, site.read_wire(state["wire"])


def read_own_residuals(state: Mapping[str, Any], site: Site) -> checkpoint.States:
    """Return the residuals of the rank that saved a state, whatever its site was; ValueError if unfit."""
    fields = checkpoint.check_fields(state["averaging"])
    if len(fields.memory) > 1:
        raise ValueError(
            f"this state has the residuals of {len(fields.memory)} ranks: give each rank its own, as "
            "state_dict() returns it without gather"
        )
    own = next(iter(fields.memory.values()), {})
    num_shards = site.grid.num_shards
    alone, shard = Grid(num_shards, num_shards), site.rank % num_shards
    state = {**state["averaging"], "world_size": num_shards, "memory": {alone.name(shard): own}}
    return checkpoint.read(state, site.whole_parameters(), (), shard, alone, "mean", site.shard_dims()).memory
