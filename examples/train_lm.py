"""Train a byte-level transformer language model on the source of Python's standard library.

torchrun --nproc-per-node 2 examples/train_lm.py --recipe int8
torchrun --nproc-per-node 2 examples/train_lm.py --recipe int4 --checkpoint run/   # again: it goes on
"""

import argparse
import contextlib
import math
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import Progress, TextColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from lm import LM, corpus, pieces, starts

LENGTH = 128  # bytes in a piece of text


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a twentieth of the steps, then down along a cosine to a tenth."""
    warm_up = max(1, steps // 20)
    cosine = 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))
    return peak * ((step + 1) / warm_up if step < warm_up else cosine)


def save(folder: Path, wire: gradwire.Wire, **shared: object) -> None:
    """Write what training goes on from: rank 0 what ranks share, and each what its wire holds back."""
    rank, new = dist.get_rank(), folder / f"new{dist.get_rank()}.pt"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"wire": wire.state_dict(), **(shared if rank == 0 else {})}, new)
    dist.barrier()  # every rank's file is whole before any takes the place of an old one
    new.rename(folder / f"rank{rank}.pt")


def parse_options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="fp32", help="what goes over the wire, such as bf16 or int4")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help="pieces of text a rank in a backward pass")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes in a step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations, and checkpoints")
    parser.add_argument("--checkpoint", type=Path, help="a folder to go on from, and to save to")
    return parser.parse_args()


def main() -> None:
    """Train."""
    options = parse_options()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    text, held_out = (part.to(device) for part in corpus())
    torch.manual_seed(0)
    net = LM(options.width, options.layers, LENGTH).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    model = DistributedDataParallel(net)
    wire = gradwire.attach(model, options.recipe)
    first = 0
    if options.checkpoint and (options.checkpoint / "rank0.pt").exists():
        saved = torch.load(options.checkpoint / "rank0.pt", map_location=device)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        own = torch.load(options.checkpoint / f"rank{rank}.pt", map_location=device)
        wire.load_state_dict(own["wire"])
        first = saved["step"]

    def batch(source: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        return pieces(source, starts(source, (options.batch,), LENGTH, seed), LENGTH)

    def evaluate() -> float:
        with torch.no_grad():
            loss = torch.stack([net(*batch(held_out, rank + world_size * i)) for i in range(8)]).mean()
        dist.all_reduce(loss)
        return loss.item() / world_size

    columns = (*Progress.get_default_columns(), TextColumn("held-out loss {task.fields[loss]:.3f}"))
    with Progress(*columns, disable=rank > 0) as progress:
        loss = evaluate()
        bar = progress.add_task(options.recipe, total=options.steps, completed=first, loss=loss)
        for step in range(first, options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options.steps, options.lr)
            optimizer.zero_grad()
            for i in range(options.accumulate):
                last = i == options.accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    seed = (step * options.accumulate + i) * world_size + rank
                    (model(*batch(text, seed)) / options.accumulate).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # of the mean, so the same on all ranks
            optimizer.step()
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                loss = evaluate()
                if options.checkpoint:
                    states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                    save(options.checkpoint, wire, step=step + 1, **states)
            progress.update(bar, advance=1, loss=loss)
    if rank == 0:
        sent_mb = (wire.stats().bytes_sent or 0) / 1e6
        print(f"{options.recipe}: held-out loss {loss:.4f} nats a byte, {sent_mb:.1f} MB sent by a rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
