"""Averagings between virtual ranks, recorded as CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.lanes import may_record, no_collection
from gradwire.peers import Traffic

# The first runs allocate states and scratch memory, and compile kernels.
_RUNS_BEFORE = 2


class VirtualRecordings:
    """Replays the work of all virtual ranks on a GPU, once the same work has come before.

    Many ranks begin many small kernels, from one thread at a time: the host would take several times as long
    as the device. The bits are those of work that is not recorded.
    """

    def __init__(self) -> None:
        self._recorded: dict[Hashable, _Recording] = {}
        self._num_runs: Counter[Hashable] = Counter()

    def run(
        self, key: Hashable | None, step: int, run: Callable[[Tensor | None], list[Traffic]]
    ) -> list[Traffic]:
        """Run the work of a step, or replay it, and return each rank's traffic.

        ``key`` says what the work depends on, beside the step and values in memory; None if it cannot be
        recorded. ``run`` takes the step in device memory, if kernels are to read it there.
        """
        if key is None or not may_record():
            return run(None)
        if key not in self._recorded:
            self._num_runs[key] += 1
            if self._num_runs[key] <= _RUNS_BEFORE:
                return run(None)
            self._recorded[key] = _record(run)
        return self._recorded[key].replay(step)

    def clear(self) -> None:
        """Forget all recordings; to be called when values come to lie elsewhere in memory."""
        self._recorded.clear()
        self._num_runs.clear()


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    step: Tensor
    """The memory from which kernels read the step."""
    traffic: list[Traffic]

    def replay(self, step: int) -> list[Traffic]:
        self.step.fill_(step)
        self.graph.replay()
        return self.traffic


def _record(run: Callable[[Tensor | None], list[Traffic]]) -> _Recording:
    step, graph = torch.zeros((), dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
    # Ranks are threads: what they begin on the stream is recorded, and they may allocate memory meanwhile.
    with no_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        traffic = run(step)
    return _Recording(graph, step, traffic)
