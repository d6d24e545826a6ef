"""Train a language model with DiLoCo on workers that come and go, under torchrun's elastic agent.

Start this on each machine, at any time, with the address of the first one:

    torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 100 --rdzv-conf last_call_timeout=3 \
        --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/diloco_elastic.py --folder here/

When a worker is lost, or another joins, torchrun starts this script again on the machines that are there. A
worker goes on from its folder. One without a folder takes the model from the others. To see a worker die and
another join, on four hosts with links of 10 Mbit/s: python benchmarks/elastic.py
"""

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from lm import LM, corpus, pieces, starts
from train_lm import learning_rate

LENGTH, BATCH, PEAK = 64, 4, 3e-3
NUM_HELD_OUT = 256


def save(path: Path, **parts: Any) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: part.state_dict() for name, part in parts.items()}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def main() -> None:
    """Train, and print the loss on text that was held out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where this worker keeps its checkpoint")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--period", type=int, default=20)
    options = parser.parse_args()
    saved_at = options.folder / "worker.pt"

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    net = LM(width=96, layers=3, length=LENGTH)
    model = DistributedDataParallel(net)
    model.broadcast_buffers = False  # send nothing but averages; torch 2.13 renames the argument
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    outer = gradwire.DiLoCo(lr=0.7, momentum=0.6, fragments=2, delay=2)
    local = gradwire.LocalSGD(model, optimizer, period=options.period, recipe="int4", outer=outer)
    saved = torch.load(saved_at, weights_only=True) if saved_at.exists() else None
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    has_joined = local.resume(None if saved is None else saved["local"])
    how = "takes the model from the others" if has_joined else "goes on" if saved is not None else "begins"
    print(f"{how} at step {local.num_steps}, with {dist.get_world_size()} workers", flush=True)

    text, held_out = corpus()
    parts = {"net": net, "optimizer": optimizer, "local": local}
    try:
        while local.num_steps < options.steps:
            step = local.num_steps
            places = starts(text, (BATCH,), LENGTH, seed=1000 * step + dist.get_rank())
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options.steps, PEAK)
            optimizer.zero_grad()
            model(*pieces(text, places, LENGTH)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if local.step():
                save(saved_at, **parts)
                print(f"step {local.num_steps}", flush=True)
        local.average()
    except gradwire.WireError:  # another worker is lost: keep what this one has done since the last average
        save(saved_at, **parts)
        raise
    with torch.no_grad():
        places = starts(held_out, (NUM_HELD_OUT,), LENGTH, seed=0)
        losses = [net(*pieces(held_out, part, LENGTH)) for part in places.split(64)]
    print(f"held-out loss {float(torch.stack(losses).mean()):.4f}", flush=True)
    local.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
