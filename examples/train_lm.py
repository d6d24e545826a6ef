"""Train a byte-level transformer language model on the source of Python's standard library.

torchrun --nproc-per-node 2 examples/train_lm.py --recipe int8
torchrun --nproc-per-node 2 examples/train_lm.py --recipe int4 --checkpoint run/   # run it again to resume
"""

import argparse
import contextlib
import math
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import Progress, TextColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from lm import LM, corpus, pieces, starts

LENGTH = 128  # bytes per piece of text
NUM_EVALUATED = 16  # batches of held-out text


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate: linear warm-up over a twentieth of the steps, then a cosine down to a tenth."""
    warm_up = max(1, steps // 20)
    cosine = 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))
    return peak * ((step + 1) / warm_up if step < warm_up else cosine)


def save(folder: Path, step: int, wire: gradwire.Wire, **shared: object) -> None:
    """Write a checkpoint: every rank saves its wire's state, and rank 0 what all ranks share."""
    rank, new = dist.get_rank(), folder / "new"
    new.mkdir(parents=True, exist_ok=True)
    torch.save({"wire": wire.state_dict(), **(shared if rank == 0 else {})}, new / f"rank{rank}.pt")
    dist.barrier()  # all files are complete before they replace the old ones
    if rank == 0:
        old = list(folder.glob("step*"))
        new.rename(folder / f"step{step:08}")
        for one in old:
            shutil.rmtree(one)


def load(folder: Path, wire: gradwire.Wire, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, saved by any number of ranks; return the number of steps done."""
    saved = max(folder.glob("step*"), default=None)
    if saved is None:
        return 0
    device = next(net.parameters()).device
    shared = torch.load(saved / "rank0.pt", map_location=device)
    net.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    num_saved = shared["wire"]["world_size"]
    ranks = [dist.get_rank()] if num_saved == dist.get_world_size() else range(num_saved)
    wires = (torch.load(saved / f"rank{r}.pt", map_location=device)["wire"] for r in ranks)
    wire.load_state_dict(gradwire.merge_state_dicts(wires))
    return int(saved.name.removeprefix("step"))


def count(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, not {text!r}")
    return int(text)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="fp32", help="a recipe of gradwire, such as bf16 or int4")
    parser.add_argument("--steps", type=count, default=400)
    parser.add_argument("--batch", type=count, default=8, help="pieces of text per rank and backward pass")
    parser.add_argument("--accumulate", type=count, default=2, help="backward passes per step")
    parser.add_argument("--width", type=count, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=count, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--every", type=count, default=100, help="steps between evaluations and checkpoints")
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder that all ranks see, to resume from and save to"
    )
    return parser.parse_args()


def main() -> None:
    """Train, evaluate and save."""
    options = parse_options()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(rank) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    text, held_out = (part.to(device) for part in corpus())
    torch.manual_seed(0)
    net = LM(options.width, options.layers, LENGTH).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    model = DistributedDataParallel(net)
    wire = gradwire.attach(model, options.recipe)
    first = load(options.checkpoint, wire, net, optimizer) if options.checkpoint else 0

    def batch(source: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        return pieces(source, starts(source, (options.batch,), LENGTH, seed), LENGTH)

    @torch.no_grad()
    def evaluate() -> float:  # the same pieces for any number of ranks
        own = [net(*batch(held_out, seed)) for seed in range(rank, NUM_EVALUATED, world_size)]
        loss = torch.tensor(own, device=device).sum()
        dist.all_reduce(loss)
        return loss.item() / NUM_EVALUATED

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
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # gradients are averaged: the same on all ranks
            optimizer.step()
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                loss = evaluate()
                if options.checkpoint:
                    states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                    save(options.checkpoint, step + 1, wire, **states)
            progress.update(bar, advance=1, loss=loss)
    if rank == 0:
        sent = f"{(wire.stats().bytes_sent or 0) / 1e6:.1f} MB sent by a rank"
        print(f"{options.recipe}: held-out loss {loss:.4f} nats a byte, {sent} since step {first}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
