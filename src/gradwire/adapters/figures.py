"""Figures of a running wire, for the loggers of frameworks."""

from __future__ import annotations

import time

from gradwire.telemetry import WireStats, combine


class Figures:
    """Turns statistics into figures by name: each is that of the steps since the last reading."""

    def __init__(self) -> None:
        self._read_at_s = time.perf_counter()
        self._last = WireStats(0, 0, 0, 0.0, 0.0, ())

    def read(self, stats: WireStats) -> dict[str, float]:
        """Return the figures that are known, under names that begin with ``gradwire/``."""
        now_s = time.perf_counter()
        num_steps = max(1, stats.num_steps - self._last.num_steps)
        elapsed_ms = 1e3 * (now_s - self._read_at_s)
        wait_ms = _difference(stats.wait_ms, self._last.wait_ms)
        work_ms = _difference(stats.work_ms, self._last.work_ms)
        bytes_sent = _difference(stats.bytes_sent, self._last.bytes_sent)
        figures: dict[str, float | None] = {
            "bytes_sent": None if bytes_sent is None else bytes_sent / num_steps,
            "total_bytes_sent": stats.bytes_sent,
            "wait_ms": None if wait_ms is None else wait_ms / num_steps,
            "work_ms": None if work_ms is None else work_ms / num_steps,
            # Buckets wait side by side, so that the sum of their times may be longer than the time.
            "wait_share": None if wait_ms is None else min(1.0, wait_ms / max(elapsed_ms, 1e-6)),
            "skipped_steps": stats.num_skipped,
        }
        if stats.parameters:
            figures |= combine(stats.parameters)
        self._read_at_s, self._last = now_s, stats
        return {f"gradwire/{name}": float(value) for name, value in figures.items() if value is not None}


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else max(0.0, now - before)
