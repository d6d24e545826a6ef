"""The hook slot of a model.

DDP takes one hook per model, for good. So ours stays registered, and the bridge behind it changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp.bridge import Bridge
from gradwire.ddp.hook_info import hook_name
from gradwire.ddp.mixed_precision import average_by
from gradwire.torch_private import (
    GradBucket,
    backward_pass,
    ddp_facts,
    divides_by_active_ranks,
    registered_hooks,
)


class HookTaken(ValueError, RuntimeError):
    """The model has a hook already; a RuntimeError too, as DDP raises for a second hook."""


class HookSlot:
    """The hook that DDP holds for a model, and the bridge behind it while one is attached."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.bridge: Bridge | None = None
        self.give_way: Callable[[], None] | None = None
        """Frees the slot for another bridge; None if the current bridge stays."""
        self.owner: str | None = None
        """The feature that has put the current bridge here on a user's behalf, if one has."""
        # Weakly: DDP's reducer holds the hook, and the hook holds this.
        self._ddp = weakref.ref(ddp)
        self._registered = False

    @property
    def model(self) -> DistributedDataParallel:
        """The model whose slot this is; RuntimeError if it exists no more."""
        ddp = self._ddp()
        if ddp is None:
            raise RuntimeError(
                "the DistributedDataParallel of this wire exists no more; state_dict and stats still work. "
                "For all else, keep a reference to the model, or attach to the one that you train now"
            )
        return ddp

    def is_of(self, ddp: DistributedDataParallel) -> bool:
        """Return True if this is the slot of ``ddp``."""
        return self._ddp() is ddp

    def take(self, bridge: Bridge) -> None:
        """Put ``bridge`` behind the hook, and register the hook if needed; an earlier bridge gives way."""
        if not self._registered:
            ddp = self.model

            # No annotations, and a parameter called `bucket`: DDP inspects both.
            def gradwire_hook(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
                return self._run(bucket)

            if ddp.mixed_precision is not None:
                average_by(ddp, self._run)
            else:
                ddp.register_comm_hook(None, gradwire_hook)
            # DDP keeps a second reference to the hook, for its Python reducer only. Copies and pickles of the
            # model would include it.
            registered_hooks(ddp).clear()
            self._registered = True
        if self.give_way is not None:
            self.give_way()
        self.bridge = bridge

    def leave(self, bridge: Bridge) -> None:
        """Return to plain averaging, unless another bridge has taken the slot."""
        if self.bridge is bridge:
            self.bridge = self.owner = None

    def _run(self, bucket: GradBucket) -> Future[Tensor]:
        return self.bridge.run(bucket) if self.bridge is not None else self._average_plainly(bucket)

    def _average_plainly(self, bucket: GradBucket) -> Future[Tensor]:
        """Average as DDP does without a hook, on the model's own group."""
        group, flat = self.model.process_group, bucket.buffer()
        divisor = torch.tensor(float(group.size()), dtype=torch.float64)
        if divides_by_active(self._ddp):
            in_backward = backward_pass() != -1
            divisor = torch.tensor(float(in_backward), dtype=torch.float64, device=flat.device)
            dist.all_reduce(divisor, group=group)
        work = dist.all_reduce(flat.div_(divisor), group=group, async_op=True)
        assert work is not None
        future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future


def divides_by_active(model: weakref.ref[DistributedDataParallel]) -> bool:
    """Return True if ``join()`` divides by the number of ranks that still have input."""
    ddp = model()
    return ddp is not None and divides_by_active_ranks(ddp)


_slots: weakref.WeakKeyDictionary[DistributedDataParallel, HookSlot] = weakref.WeakKeyDictionary()


def free_slot(ddp: DistributedDataParallel) -> HookSlot:
    """Return the model's slot; `HookTaken` if it is taken and does not give way."""
    slot = _slots.get(ddp)
    if slot is None:
        if registered_hooks(ddp) and ddp.mixed_precision is None:
            raise HookTaken(
                f"the model has a hook already, {hook_name(registered_hooks(ddp)[0][0])}, and DDP takes "
                "one in its life; register that hook through gradwire.attach(model, hook, state=...) instead"
            )
        builtin = ddp_facts(ddp).get("comm_hook")
        if builtin and ddp.mixed_precision is None:
            raise HookTaken(
                f"the model has a hook of DDP's own already, {builtin}, and DDP takes one in its life; leave "
                "_register_builtin_comm_hook out, and attach 'fp32' or 'fp16'"
            )
        slot = _slots[ddp] = HookSlot(ddp)
        _keep_group_beyond_reducer(ddp)
    if slot.bridge is not None and slot.give_way is None:
        if slot.owner is not None:
            raise HookTaken(f"{slot.owner} trains this model already; call detach() on it first")
        raise HookTaken(
            f"{slot.bridge.runner.name} is attached to this model already; call detach() on its wire first"
        )
    return slot


# Note [The last reference to a group]
# Gloo's threads need the GIL to drop the tensors of a collective that is over, and a group that is destroyed
# waits for its threads. torch releases the GIL for that if Python held the last reference to the group. If
# DDP's reducer held it, torch does not, and all wait for ever. That happens on a busy machine, in a program
# that destroys its groups and then drops its model. `tests/test_exit.py` makes it happen.
def _keep_group_beyond_reducer(ddp: DistributedDataParallel) -> None:
    """Hold the model's group in Python until the reducer is gone."""
    for owner in (ddp.reducer, ddp.logger):  # a logger holds its reducer
        weakref.finalize(owner, _let_go, ddp.process_group).atexit = False


def _let_go(group: dist.ProcessGroup) -> None:
    """Do nothing: with this call, Python lets go of the group."""
