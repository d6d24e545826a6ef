"""CUDA graphs of functions: of one that is repeated, or of several that run side by side.

A backward pass of the models of `convergence.py` has 600 small kernels. They take longer to launch than to
run, and none of them fills the GPU.
"""

from collections.abc import Callable, Sequence

import torch

from gradwire.lanes import no_collection


def record_branches(functions: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Record a CUDA graph with a branch for each function, and return a call that replays it.

    Each function is also run three times. A replay reads and writes the memory that the functions do.
    """
    branches = [torch.cuda.Stream() for _ in functions]

    def run(num_times: int) -> None:
        main = torch.cuda.current_stream()
        for branch, function in zip(branches, functions, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                for _ in range(num_times):
                    function()
        for branch in branches:
            main.wait_stream(branch)

    run(3)
    torch.cuda.synchronize()
    return _record(lambda: run(1))


class Repeated:
    """A function that depends on nothing but device memory: from its third call on, a CUDA graph of it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._num_calls = 0
        self._replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        self._num_calls += 1
        if self._num_calls <= 2:  # an optimizer makes its state in the first step
            self._function()
            return
        if self._replay is None:
            self._replay = _record(self._function)
        self._replay()


def _record(function: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph):  # those of earlier rows may be garbage
        function()
    return graph.replay
