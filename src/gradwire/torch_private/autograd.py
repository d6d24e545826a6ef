"""Private names of autograd and of the profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future

# Rows of `PRIVATE_NAMES`.
AUTOGRAD_NAMES = (
    ("torch._C:_current_graph_task_id", "tells a backward pass from join()", "a flag of our own hooks"),
    ("torch._C:_current_autograd_node", "tells a pass from the callbacks after it", "count all buckets"),
    (
        "torch.autograd:Variable._execution_engine.queue_callback",
        "raises errors from backward()",
        "raise them in the next forward pass",
    ),
    ("torch._C._autograd:_profiler_enabled", "records ranges only if read", "record them always"),
    (
        "torch.profiler:record_function._call_end_callbacks_on_future",
        "ends a range with the future",
        "end it when the hook returns",
    ),
)


def backward_pass() -> int:
    """Return the number of the backward pass that this thread is in; -1 outside of one."""
    number: int = torch._C._current_graph_task_id()
    return number


def is_in_node() -> bool:
    """Return True if a node of the autograd graph calls this, and not a callback after the backward pass."""
    return torch._C._current_autograd_node() is not None


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward pass under way; an error that it raises leaves it."""
    Variable._execution_engine.queue_callback(callback)


def profiler_is_on() -> bool:
    """Return True while a profiler records."""
    return bool(torch._C._autograd._profiler_enabled())


def end_range_with(recorded: torch.profiler.record_function, future: Future[Tensor]) -> Future[Tensor]:
    """End a profiler's range when ``future`` completes; return a future that completes after that."""
    ended: Future[Tensor] = recorded._call_end_callbacks_on_future(future)
    return ended
