"""One rank of a script that is being measured, in a process of its own.

``python -m gradwire.headroom.script_rank JSON`` runs the script with one recipe, times its steps, and ends
it after a given number of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.ddp import Attachments, attach_to_all
from gradwire.processes import end_with_parent
from gradwire.scripts import Script, run_script, show_error


class _Enough(BaseException):
    """Ends the script; no Exception, so that a script that catches those ends too."""


class _Stopwatch:
    """Notes when each training step ends, and raises after the last that was asked for.

    One step may call several optimizers, as with a generator and its critic, or one for matrices and one
    for the rest: the next step has ended when one of them is called again.
    """

    def __init__(self, num_steps: int) -> None:
        self.ends: list[float] = []
        self.backend = "none"
        self._num_steps = num_steps
        self._called: set[int] = set()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._called and id(optimizer) not in self._called:
            self._called.add(id(optimizer))
            return
        self._called = {id(optimizer)}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) > self._num_steps:
            self.backend = dist.get_backend() if dist.is_initialized() else "none"
            raise _Enough


def main() -> None:
    """Run what the first argument describes, and leave what was found in the file that it names."""
    task = json.loads(sys.argv[1])
    end_with_parent(lambda: os.read(task["lifeline"], 1))
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
        except Exception as error:
            show_error(error)
            sys.exit(1)
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
    lasts = [a.wire.stats().steps[-2:] for a in attachments.made]
    layouts = [layout for a in attachments.made for layout in a.wire.layout()]

    def total(figure: str) -> Any:
        means = [_mean([getattr(b, figure) for step in last for b in step.buckets], last) for last in lasts]
        return None if None in means else sum(means)

    def count(figure: str) -> int | None:
        return None if (found := total(figure)) is None else int(found)

    return {
        "num_models": len(attachments.made) - attachments.num_given_way,
        "bytes_per_step": count("bytes_sent"),
        "num_messages": count("num_messages"),
        "wait_ms": total("wait_ms"),
        "work_ms": total("work_ms"),
        "num_parameters": sum(layout.numel for layout in layouts),
        "gradient_bytes": sum(layout.numel * layout.dtype.itemsize for layout in layouts),
    }


def _mean(figures: list[Any], steps: Sequence[Any]) -> Any:
    return None if None in figures else sum(figures) / max(1, len(steps))


if __name__ == "__main__":
    main()
