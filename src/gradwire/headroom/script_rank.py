"""One rank of a script that is being measured, in a process of its own.

``python -m gradwire.headroom.script_rank JSON`` runs the script with one recipe, times its steps, which
end with each call of an optimizer, and ends it after a given number of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.scripts import Attachments, Script, attach_to_all, run_script


class _Enough(BaseException):
    """Ends the script; no Exception, so that a script that catches those ends too."""


class _Stopwatch:
    """Notes the time of each optimizer step, and raises after the last that was asked for."""

    def __init__(self, num_steps: int) -> None:
        self.ends: list[float] = []
        self.backend = "none"
        self._num_steps = num_steps

    def __call__(self, *_: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) > self._num_steps:
            self.backend = dist.get_backend() if dist.is_initialized() else "none"
            raise _Enough


def main() -> None:
    """Run what the first argument describes, and leave what was found in the file that it names."""
    task = json.loads(sys.argv[1])
    stopwatch = _Stopwatch(task["num_steps"])
    register_optimizer_step_post_hook(stopwatch)
    recipe = task["recipe"]
    with attach_to_all(recipe) if recipe else contextlib.nullcontext() as attachments:
        try:
            run_script(Script(task["script"], tuple(task["arguments"]), task["is_module"]))
        except _Enough:
            pass
        except SystemExit as end:
            if end.code:
                raise
        found = _describe(attachments) if attachments is not None else {}
    ends = stopwatch.ends
    times_s = [end - begin for begin, end in pairwise(ends)]
    found.update(
        times_s=times_s,
        num_threads=torch.get_num_threads(),
        backend=stopwatch.backend,
        device=torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
    )
    Path(task["result"]).write_text(json.dumps(found))
    if dist.is_initialized():
        # All ranks are here, at the same step; none may close its connections while another still reads.
        dist.barrier()
        dist.destroy_process_group()


def _describe(attachments: Attachments) -> dict[str, Any]:
    """What the wires of all models sent in a step, together: the mean of their last two."""
    # Recipes may send one thing in even steps and another in odd ones.
    steps = [step for a in attachments.made for step in a.wire.stats().steps[-2:]]
    buckets = [bucket for step in steps for bucket in step.buckets]
    num_steps = max(1, len({step.step for step in steps}))
    layouts = [layout for a in attachments.made for layout in a.wire.layout()]

    def mean(figures: list[Any]) -> Any:
        return None if None in figures else sum(figures) / num_steps

    def count(figures: list[Any]) -> Any:
        return None if None in figures else sum(figures) // num_steps

    return {
        "num_models": len(attachments.made) - attachments.num_given_way,
        "bytes_per_step": count([b.bytes_sent for b in buckets]),
        "num_messages": count([b.num_messages for b in buckets]),
        "wait_ms": mean([b.wait_ms for b in buckets]),
        "work_ms": mean([b.work_ms for b in buckets]),
        "gradient_bytes": sum(layout.numel * layout.dtype.itemsize for layout in layouts),
    }


if __name__ == "__main__":
    main()
