"""The order in which DDP hands out the buckets of a backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.torch_private import GradBucket, backward_pass, is_in_node


@dataclass(frozen=True)
class BucketPosition:
    """The position of a bucket in its backward pass."""

    index: int
    is_last: bool
    """False also if it cannot be known, which only happens to raw hooks in a delayed pass."""
    closes_pass: bool
    """True for one bucket of a pass: the one at which work for after the pass is queued."""
    in_backward: bool
    """False in ``join()``, which hands out zeros for a rank that is out of input."""


class BucketOrder:
    """Find the position of each bucket that one model's reducer hands out.

    Note [Delayed passes]: with ``static_graph=True``, DDP averages nothing during its first backward pass.
    It hands out all buckets after it, from a callback of the autograd engine. There every bucket has index 0,
    and none is marked as the last unless it is the only one. (So it is in torch 2.11 to 2.13:
    ``Reducer::delay_all_reduce`` leaves ``next_bucket_`` at 0.) Buckets are counted then, and the last one
    is the one that completes the model's parameters. DDP finishes the pass in the same callback, so what
    must follow it can be queued at the first bucket.
    """

    def __init__(self, num_parameters: int | None = None) -> None:
        """Expect buckets of ``num_parameters`` in all; None if that is not known."""
        self._num_parameters = num_parameters
        self._delayed_pass = -1
        self._num_buckets = self._num_seen = 0

    def next(self, bucket: GradBucket) -> BucketPosition:
        """Return the position of the bucket that DDP hands out now; call it once per bucket."""
        this_pass = backward_pass()
        in_backward = this_pass != -1
        if not in_backward or not self._is_delayed(bucket, this_pass):
            return BucketPosition(bucket.index(), bucket.is_last(), bucket.is_last(), in_backward)
        if self._delayed_pass != this_pass:
            self._delayed_pass, self._num_buckets, self._num_seen = this_pass, 0, 0
        index = self._num_buckets
        self._num_buckets += 1
        self._num_seen += len(bucket.parameters())
        is_last = bucket.is_last() or self._num_seen == self._num_parameters
        return BucketPosition(index, is_last, index == 0, in_backward)

    def _is_delayed(self, bucket: GradBucket, this_pass: int) -> bool:
        """Return True if the bucket comes after its backward pass, when no node of the graph runs."""
        if self._delayed_pass == this_pass:
            return True
        return bucket.index() == 0 and not is_in_node()
