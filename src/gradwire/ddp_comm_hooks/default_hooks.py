"""Uncompressed averaging and 16-bit averaging.

DDP inspects the annotations of a hook, so this module keeps them as objects.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.ddp import HookInfo, check_result, hook_name, register_hook_info, require_future
from gradwire.ddp_comm_hooks._raw import run_recipe
from gradwire.recipes import Recipe, bf16, fp16, fp32
from gradwire.torch_private import GradBucket

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def _hook(recipe: Recipe, name: str, doc: str) -> Hook:
    def hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
        return run_recipe(recipe, process_group, bucket)

    # DDP refuses hooks called "bf16_compress_hook" on machines without NCCL.
    hook.__name__ = f"gradwire_{name}"
    hook.__qualname__ = name  # pickle finds the hook by this name
    hook.__doc__ = doc
    register_hook_info(hook, HookInfo(recipe=recipe))
    return hook


allreduce_hook = _hook(
    fp32(),
    "allreduce_hook",
    """Average gradients in their own dtype, as DDP does without a hook.""",
)

fp16_compress_hook = _hook(
    fp16(),
    "fp16_compress_hook",
    """Average gradients with fp16 on the wire.

    Each message has its own power-of-two scale, and sums are fp32. So values beyond
    65504 travel too.
    """,
)

bf16_compress_hook = _hook(
    bf16(),
    "bf16_compress_hook",
    """Average gradients with bf16 on the wire and sums in fp32; on Gloo as well as NCCL.""",
)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Give ``hook`` its bucket as fp16, and its result back in the bucket's own dtype.

    Around `allreduce_hook` this is `fp16_compress_hook`. Around any other hook the cast is plain: values
    above 65504 become infinite.
    """
    return _wrapper(hook, torch.float16, "fp16_compress_wrapper_hook", fp16_compress_hook)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Give ``hook`` its bucket as bf16, and its result back in the bucket's own dtype.

    Around `allreduce_hook` this is `bf16_compress_hook`.
    """
    return _wrapper(hook, torch.bfloat16, "bf16_compress_wrapper_hook", bf16_compress_hook)


def _wrapper(hook: Hook, dtype: torch.dtype, name: str, around_allreduce: Hook) -> Hook:
    if hook is allreduce_hook or hook is around_allreduce:
        return around_allreduce

    def compress_wrapper_hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        original = bucket.buffer()
        if original.dtype.itemsize <= dtype.itemsize or original.is_sparse:
            return hook(state, bucket)
        bucket.set_buffer(original.to(dtype))

        def decompress(done: Future[torch.Tensor]) -> torch.Tensor:
            bucket.set_buffer(original)
            # Checked before the copy, which would broadcast a result of another shape.
            return original.copy_(check_result(hook_name(hook), done.value(), original, is_copied=True))

        return require_future(hook_name(hook), hook(state, bucket)).then(decompress)

    register_hook_info(compress_wrapper_hook, HookInfo(wraps=hook))
    compress_wrapper_hook.__name__ = f"gradwire_{name}"
    compress_wrapper_hook.__qualname__ = f"gradwire_{name}({hook_name(hook)})"
    return compress_wrapper_hook
