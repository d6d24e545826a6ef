"""The environment by which torchrun tells a process which rank it is, and a port for it."""

from __future__ import annotations

import contextlib
import os
import random
import socket


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


def free_port() -> int:
    """Return a free port below those that the system hands out.

    The system could give one of its own away before the script takes it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
