"""Train a byte-level transformer language model on the source of Python's standard library.

torchrun --nproc-per-node 2 examples/train_lm.py --recipe int8
torchrun --nproc-per-node 2 examples/train_lm.py --recipe int4 --checkpoint run/   # again: it goes on
"""

import argparse
import contextlib
import hashlib
import math
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import Progress, TextColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradwire


def corpus() -> tuple[Tensor, Tensor]:
    """All bytes of the standard library's files, to train on, and of every twentieth, held out."""
    root, train, held_out = Path(sysconfig.get_path("stdlib")), bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" not in name and "dist-packages" not in name:
            is_held_out = hashlib.sha256(name.encode()).digest()[0] % 20 == 0
            (held_out if is_held_out else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def starts(text: Tensor, shape: tuple[int, ...], length: int, seed: int) -> Tensor:
    """Places in the text at which pieces begin, as the seed decides."""
    return torch.randint(len(text) - length, shape, generator=torch.Generator().manual_seed(seed))


def pieces(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and the byte that follows each byte."""
    found = text[starts.unsqueeze(-1) + torch.arange(length + 1, device=text.device)].long()
    return found[:, :-1], found[:, 1:]


class LM(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if ends_branch else 1))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, in nats a byte."""
        x = self.bytes(inputs) + self.places.weight
        logits = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a twentieth of the steps, then down along a cosine to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write what training goes on from; renamed at the end, so that a file is whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "new.pt")
    (folder / "new.pt").rename(folder / "training.pt")


def parse_options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="fp32", help="what goes over the wire, such as bf16 or int4")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8, help="pieces of text a rank in a backward pass")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes in a step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=128, help="bytes in a piece of text")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations, and checkpoints")
    parser.add_argument("--checkpoint", type=Path, help="a folder to go on from, and to save to")
    return parser.parse_args()


def main() -> None:
    """Train."""
    options = parse_options()
    has_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if has_cuda else torch.device("cpu")
    text, held_out = corpus()
    torch.manual_seed(0)
    net = LM(options.width, options.layers, options.length).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    wire = gradwire.attach(model, options.recipe)
    first, saved = 0, options.checkpoint and options.checkpoint / "training.pt"
    if saved and saved.exists():
        state = torch.load(saved, map_location=device)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]

    def batch(source: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        inputs, targets = pieces(
            source, starts(source, (options.batch,), options.length, seed), options.length
        )
        return inputs.to(device), targets.to(device)

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
                if options.checkpoint and rank == 0:
                    save(options.checkpoint, net, optimizer, step + 1)
            progress.update(bar, advance=1, loss=loss)
    if rank == 0:
        sent_mb = (wire.stats().bytes_sent or 0) / 1e6
        print(f"{options.recipe}: held-out loss {loss:.4f} nats a byte, {sent_mb:.1f} MB sent by a rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
