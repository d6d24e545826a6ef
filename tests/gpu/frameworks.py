"""The frameworks' examples over two NCCL ranks: ``python -m tests.gpu.frameworks``, with them installed.

To run only some, name them: ``python -m tests.gpu.frameworks lightning fabric``. Two ranks share the GPU as
if they were two nodes with one GPU each. Every example is run to the end, resumed from its first checkpoint,
and run unchanged under ``gradwire.run``.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from gradwire.processes import free_port, rank_environment

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "lightning": (["--devices", "1", "--nodes", "2"], "epoch=0.ckpt"),
    "fabric": (["--devices", "1", "--nodes", "2"], "epoch=0.ckpt"),
    "accelerate": ([], "epoch=0"),
    "accelerate-shard": (["--shard"], "epoch=0"),
    "transformers": ([], "checkpoint-8"),
    "transformers-shard": (["--shard"], "checkpoint-8"),
}
LIMIT_S = 120
"""Seconds for one run, of which imports take the most."""


def run(command, folder):
    """Run ``python COMMAND`` as two ranks; return what they said. Slow ranks show their stacks and end."""
    port, ranks, logs = free_port(), [], [folder / f"rank{rank}.log" for rank in range(2)]
    for rank, log in enumerate(logs):
        environment = rank_environment(
            rank, 2, local_rank=0, local_world_size=1, address="127.0.0.1", port=port
        )
        environment |= {"NODE_RANK": str(rank), "GROUP_RANK": str(rank), "OMP_NUM_THREADS": "2"}
        environment |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
        environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONFAULTHANDLER": "1"}
        with log.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    env={**os.environ, **environment},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    begin = time.monotonic()
    try:
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, begin + LIMIT_S - time.monotonic()))
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
                process.wait(10)
    finally:
        for process in ranks:
            process.kill()
    print(f"       {time.monotonic() - begin:.1f} s: {' '.join(map(str, command))}", flush=True)
    said = [log.read_text() for log in logs]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(each[-3000:] for each in said)
    return "\n".join(said)


def check(name, folder):
    options, checkpoint = EXAMPLES[name]
    script = [ROOT / "examples" / f"{name.partition('-')[0]}_train.py", *options]
    whole, resumed = folder / "whole", folder / "resumed"
    run([*script, "--recipe", "int4", "--folder", whole], folder)
    run([*script, "--recipe", "int4", "--folder", resumed, "--resume", whole / checkpoint], folder)
    parts = [torch.load(each / "weights.pt", map_location="cpu") for each in (whole, resumed)]
    assert all(torch.equal(parts[0][key], parts[1][key]) for key in parts[0]), "a resumed run differs"
    command = ["-m", "gradwire.run", "--recipe", "int4", *script, "--folder", folder / "unchanged"]
    said = run(command, folder)
    return next(line for line in said.splitlines() if line.startswith("gradwire int4"))


def main():
    assert torch.cuda.is_available(), "these checks need a CUDA device"
    num_failed = 0
    for name in sys.argv[1:] or EXAMPLES:
        if importlib.util.find_spec("lightning" if name == "fabric" else name.partition("-")[0]) is None:
            print(f"absent {name}", flush=True)
            continue
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = check(name, Path(folder))
            except Exception as error:
                num_failed += 1
                print(f"FAILED {name}: {error!r}"[:6000].replace("\\n", "\n"), flush=True)
            else:
                print(f"ok     {name} ({time.perf_counter() - begin:.1f} s): {said}", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
