"""The handle of an averaging under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.futures import Future


class AveragingHandle:
    """An averaging under way; `wait` for it before you read or change its tensors.

    >>> averager = gradwire.Averager("bf16")
    >>> handle = averager.start([p.detach() for p in model.parameters()])
    >>> handle.wait()  # after other work
    >>> handle.done()
    True
    """

    def __init__(
        self, futures: Sequence[Future[Tensor]], names: frozenset[str], end: Callable[[list[Tensor]], None]
    ) -> None:
        """Wait for ``futures``; then call ``end`` with their results, once."""
        self.names = names
        self._futures = list(futures)
        self._end: Callable[[list[Tensor]], None] | None = end

    def wait(self) -> None:
        """Wait for the averages, and leave them in the tensors.

        On CUDA the current stream waits, not the host. Raises `WireError` if the averaging has failed on any
        rank; the tensors then hold undefined values.
        """
        if self._end is not None:
            self._end([future.wait() for future in self._futures])
            # Holds neither the tensors nor the averager any longer.
            self._futures, self._end = [], None

    def wait_for_lane(self) -> None:
        """Wait until the lane is done with the averaging; leave results where they are."""
        for future in self._futures:
            future.wait()

    def done(self) -> bool:
        """Return True if `wait` would not wait for other ranks; on CUDA, if the work is enqueued."""
        return all(future.done() for future in self._futures)
