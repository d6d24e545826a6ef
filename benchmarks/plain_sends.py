"""The bytes of a step of FSDP2 by plain Gloo sends, beside the same compute: what a step needs at least.

Nothing is copied, encoded, summed or compared. All gathers begin with the step, and scatters as soon as a
block's gradients are there.
"""

import collections
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.headroom.workloads import BuiltWorkload


class PlainSends:
    """A model that is not sharded, and messages as large as those of its blocks' shards; two ranks."""

    def __init__(self, model: nn.Module, gather_bytes: int, scatter_bytes: int, num_gathers: int) -> None:
        """Share the bytes of a step's gathers and scatters out to the blocks; collective."""
        self._model, blocks = model, list(model.children())
        self._num_messages = num_gathers * len(blocks)
        self._gather = Exchange(gather_bytes // self._num_messages)
        self._scatter = Exchange(scatter_bytes // len(blocks))
        self._gathers_twice = num_gathers == 2
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: self._gather.wait())
            block.register_forward_hook(self._follow(is_last=block is blocks[-1]))

    def step(self, built: BuiltWorkload) -> None:
        """Compute a step, and send the bytes that it would need."""
        self._model.zero_grad()
        for _ in range(self._num_messages):
            self._gather.begin()
        built.step_loss(self._model).backward()
        self._scatter.begin()
        self._scatter.wait_for_all()

    def _follow(self, *, is_last: bool) -> Callable[[nn.Module, object, Tensor], None]:
        def before_backward(_: Tensor) -> None:
            if not is_last:
                self._scatter.begin()  # the gradients of the next block are there
            if self._gathers_twice:
                self._gather.wait()

        def after_forward(block: nn.Module, inputs: object, output: Tensor) -> None:
            output.register_hook(before_backward)

        return after_forward


class Exchange:
    """Messages of one size between two ranks, in order, on a connection of their own."""

    def __init__(self, num_bytes: int) -> None:
        """Connect; collective."""
        self._group = dist.new_group(backend="gloo")
        self._peer = 1 - dist.get_rank()
        self._row, self._arriving = torch.zeros(2, num_bytes, dtype=torch.uint8)
        self._works: collections.deque[tuple[dist.Work, dist.Work]] = collections.deque()

    def begin(self) -> None:
        received = dist.irecv(self._arriving, self._peer, group=self._group)
        sent = dist.isend(self._row, self._peer, group=self._group)
        assert received is not None
        assert sent is not None
        self._works.append((received, sent))

    def wait(self) -> None:
        """Return when the next message has arrived."""
        for work in self._works.popleft():
            work.wait()

    def wait_for_all(self) -> None:
        while self._works:
            self.wait()
