"""The ranks of a run as a state counts and names them: replicas, each of a number of shards."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = "(0|[1-9][0-9]{0,15})"
_WHOLE = re.compile(f"rank{_NUMBER}")
_SHARD = re.compile(f"replica{_NUMBER}-shard{_NUMBER}of{_NUMBER}")


@dataclass(frozen=True)
class Grid:
    """The number of ranks and of shards; rank ``r * S + s`` holds shard s of S in replica r.

    Names of ranks tell the number of shards, so that it is known before a checkpoint's values are read.

    >>> Grid(4).name(3), Grid(4, num_shards=2).name(3)
    ('rank3', 'replica1-shard1of2')
    >>> Grid(6, num_shards=2).holders(1), Grid(6, num_shards=2).replica(1)
    (range(1, 6, 2), range(2, 4))
    """

    world_size: int
    num_shards: int = 1

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.num_shards

    def name(self, rank: int) -> str:
        """Return the name of a rank."""
        if self.num_shards == 1:
            return f"rank{rank}"
        replica, shard = divmod(rank, self.num_shards)
        return f"replica{replica}-shard{shard}of{self.num_shards}"

    def holders(self, shard: int) -> range:
        """Return the ranks that hold a shard, one for each replica: they average together."""
        return range(shard, self.world_size, self.num_shards)

    def replica(self, number: int) -> range:
        """Return the ranks that hold the shards of a replica, in order."""
        return range(number * self.num_shards, (number + 1) * self.num_shards)


def parse_name(text: str) -> tuple[int, int] | None:
    """Return the rank that a name stands for and its number of shards; None if it is no name of a rank.

    >>> parse_name("replica1-shard1of2"), parse_name("rank3"), parse_name("rank03")
    ((3, 2), (3, 1), None)
    """
    whole, part = _WHOLE.fullmatch(text), _SHARD.fullmatch(text)
    if whole is not None:
        return int(whole[1]), 1
    if part is None:
        return None
    replica, shard, num_shards = map(int, part.groups())
    return (replica * num_shards + shard, num_shards) if shard < num_shards > 1 else None
