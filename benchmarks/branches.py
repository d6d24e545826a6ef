"""Functions that run side by side on a GPU, as one CUDA graph.

A backward pass of the models of `convergence.py` has 600 small kernels. They take longer to launch than to
run, and none of them fills the GPU.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


def record_branches(functions: Sequence[Callable[[], Result]]) -> tuple[Callable[[], None], list[Result]]:
    """Record a CUDA graph with a branch for each function; return a call that replays it, and the results.

    A replay reads what the functions read, and writes to the memory of the results.
    """
    branches = [torch.cuda.Stream() for _ in functions]

    def run(num_times: int) -> list[Result]:
        main, results = torch.cuda.current_stream(), []
        for branch, function in zip(branches, functions, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                for _ in range(num_times - 1):
                    function()
                results.append(function())
        for branch in branches:
            main.wait_stream(branch)
        return results

    run(3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(1)
    return graph.replay, results
