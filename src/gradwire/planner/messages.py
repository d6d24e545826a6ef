"""Measure the CPU time of messages between two ranks.

Gloo's thread spins while another thread holds the lock of a connection with incoming data. Here all
messages of a rank share one connection; in a cluster each peer has its own. So the least CPU time of several
attempts counts, with the least spinning. Medians were two to five times as large.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from gradwire.peers import GlooGroup, open_gloo

# As many messages at once as a worker may have peers, and the size of one part of a bucket.
_MANY = 64
_SMALL_BYTES, _LARGE_BYTES = 64, 4 << 20
_NUM_TIMES = 12


def measure_messages() -> tuple[float, float]:
    """Return the CPU ms per message and the CPU ns per byte, sent and received.

    Call it on both ranks of the default group.
    """
    assert dist.group.WORLD is not None
    group = open_gloo(dist.group.WORLD, "gradwire/calibration")
    try:
        one, many = (_cpu_ms(group, num_messages, _SMALL_BYTES) for num_messages in (1, _MANY))
        large = _cpu_ms(group, 1, _LARGE_BYTES)
    finally:
        dist.barrier()  # closing fails messages of the other rank
        group.close()
    return max(0.0, many - one) / (_MANY - 1), 1e6 * max(0.0, large - one) / _LARGE_BYTES


def _cpu_ms(group: GlooGroup, num_messages: int, num_bytes: int) -> float:
    """Return the CPU time to send and to receive so many messages, all posted at once."""
    peer = 1 - group.rank
    rows = [torch.zeros(2, num_bytes, dtype=torch.uint8) for _ in range(num_messages)]
    found = []
    for _ in range(_NUM_TIMES):
        dist.barrier()
        begin_s = time.process_time()
        rounds = [group.post(list(pair)) for pair in rows]
        for messages, pair in zip(rounds, rows, strict=True):
            messages.send(peer, pair[group.rank])
        for messages in rounds:
            messages.finish()
        found.append(1e3 * (time.process_time() - begin_s))
    return min(found[1:])
