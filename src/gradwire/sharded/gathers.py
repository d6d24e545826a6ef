"""All-gathers of parameters on a lane of their own, so that they run beside computation."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from gradwire.errors import Place
from gradwire.lanes import Lane, Promise, Run, Task
from gradwire.sharded.backward import Backward
from gradwire.sharded.units import Unit

# With two, one travels while the shards of the other are copied. Each takes memory for its parameters.
_NUM_AHEAD = 2


class Gathers:
    """The gathers of a model's units, one after the other.

    torch waits for a gather when it needs the parameters. In a backward pass it has asked for the next
    unit's before it computes. In a forward pass on CPU it has not, so this does: units are expected in the
    order of the forward pass before. Ranks run the same model, so they expect the same.
    """

    def __init__(self, lane: Lane, backward: Backward, rank: int, encoding: str, node_size: int) -> None:
        """Gather on ``lane``, whose ranks are in nodes of ``node_size``."""
        self.node_size = node_size
        self._lane = lane
        self._backward = backward
        self._rank = rank
        self._encoding = encoding
        self._num_started = 0
        self._next: dict[tuple[Unit, int] | None, Unit] = {}
        """The unit that follows a use of a unit, by the number of that use in a pass; None for the first."""
        self._in_forward = False
        self._last: tuple[Unit, int] | None = None
        self._num_uses: collections.Counter[Unit] = collections.Counter()
        self._unused: dict[Unit, None] = {}
        """Units that were asked for in this forward pass, and are not used yet."""

    def follow(self, root: nn.Module) -> Callable[[], None]:
        """Gather units ahead in the forward passes of ``root``; return a function that ends this."""
        begin: Any = torch.compiler.disable(self._begin_forward)
        end: Any = torch.compiler.disable(self._end_forward)
        handles = [
            root.register_forward_pre_hook(begin, prepend=True),  # before torch's own hook, which gathers
            root.register_forward_hook(end, always_call=True),
        ]

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop

    def start(self, unit: Unit, values: Tensor, run: Run) -> dist.Work:
        """Begin to gather a unit: let the lane call ``run`` with ``values``. Return what torch waits for."""
        if self._in_forward:
            self._unused[unit] = None
        place = Place(self._rank, self._backward.num_steps, self._num_started, f"weights={self._encoding}")
        self._num_started += 1
        promise = Promise(values)
        self._lane.submit(Task(run, (promise,), place))
        return _Gather(promise.future, functools.partial(self._use, unit))

    def _begin_forward(self, *_: Any) -> None:
        self._in_forward, self._last = True, None
        self._num_uses.clear()
        self._unused.clear()
        self._ask_ahead(None)

    def _end_forward(self, *_: Any) -> None:
        """Drop what was asked for and not used: parameters may change before the next pass."""
        self._in_forward = False
        if self._lane.failure is None:
            for unit in list(self._unused):
                unit.module.unshard()
                unit.module.reshard()

    def _use(self, unit: Unit) -> None:
        """Raise the failure of any rank, if there was one; in a forward pass, ask for the next units."""
        failure = self._lane.failure
        if failure is not None:
            self._backward.failure = self._backward.failure or failure
            self._backward.engine.fail(failure)
            raise failure.with_traceback(None)
        self._unused.pop(unit, None)
        if not self._in_forward:
            return
        use = unit, self._num_uses[unit]
        self._num_uses[unit] += 1
        self._next[self._last] = unit
        self._last = use
        self._ask_ahead(use)

    def _ask_ahead(self, use: tuple[Unit, int] | None) -> None:
        """Ask for the units that followed this use in the pass before."""
        for _ in range(_NUM_AHEAD):
            if use not in self._next:
                break
            unit = self._next[use]
            unit.module.unshard(async_op=True)  # does nothing if it is under way
            use = unit, self._num_uses[unit]


class _Gather(dist.Work):
    """A gather under way."""

    def __init__(self, future: Future[Tensor], use: Callable[[], None]) -> None:
        super().__init__()
        self._future = future
        self._use = use

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Return when the parameters are there; the lane has a timeout of its own."""
        self._future.wait()
        self._use()
        return True
