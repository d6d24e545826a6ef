"""A recipe and a hook that average as fp32 does, and change one bit on rank 1, from a step on."""

import torch
import torch.distributed as dist

import gradwire

FIRST_WRONG_STEP = 3  # DDP has rebuilt its buckets, and every step is exchanged as it arrives


def corrupt(flat, step, *, has_first):
    """Flip the last bit of the last value, in the bucket that holds the first parameters."""
    if dist.get_rank() == 1 and step >= FIRST_WRONG_STEP and has_first:
        flat.view(torch.int32)[-1] ^= 1


class Corrupting:
    """An exchange that changes a value after it has averaged."""

    communicates = True
    kernels = gradwire.fp32().exchange.kernels

    def __repr__(self):
        return "Corrupting()"

    def shared_bytes(self, layout, step):
        return 0

    def repeats_as(self, step):
        return None

    def rounds(self, flat, context):
        yield from gradwire.fp32().exchange.rounds(flat, context)
        has_first = any(slot.name == "0.weight" for slot in context.layout.slots)
        corrupt(flat, context.step, has_first=has_first)


def corrupting_recipe():
    return gradwire.Recipe("corrupting", Corrupting())


def corrupting_hook(group=None):
    """Return a hook over ``group``, by default the world."""
    num_steps = 0

    def hook(state, bucket):
        nonlocal num_steps
        num_steps += bucket.index() == 0
        is_last = bucket.is_last()

        def change(done, step=num_steps - 1, has_first=is_last):
            corrupt(done.value()[0], step, has_first=has_first)
            return done.value()[0]

        flat = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(flat, group=group, async_op=True).get_future().then(change)

    return hook
