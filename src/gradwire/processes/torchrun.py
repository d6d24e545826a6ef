"""The environment by which torchrun tells a process which rank it is."""

from __future__ import annotations

import os


def under_torchrun() -> bool:
    """Return True if torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank_environment(
    rank: int, world_size: int, *, local_rank: int, local_world_size: int, address: str, port: int
) -> dict[str, str]:
    """Return the variables that ``dist.init_process_group`` and training scripts read.

    ``address`` and ``port`` are those of the store on rank 0.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
