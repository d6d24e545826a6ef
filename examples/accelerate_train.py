"""Train a small model with Accelerate; with --recipe, average its gradients by gradwire.

torchrun --nproc-per-node 2 examples/accelerate_train.py --recipe int4
accelerate launch --num_processes 2 -m gradwire.run --recipe int4 examples/accelerate_train.py
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    """Train, and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", help="average gradients by this recipe of gradwire")
    parser.add_argument("--shard", action="store_true", help="shard the model by FSDP2, on GPUs")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--resume", help="a checkpoint to resume from")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if options.shard else None,
    )
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(torch.randn(128, 16), batch_size=8)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    if options.recipe:
        from gradwire.adapters.accelerate import attach

        attach(accelerator, net, options.recipe)
    first = 0
    if options.resume:
        accelerator.load_state(options.resume)
        first = int(options.resume.rpartition("=")[2]) + 1
    step = first * len(loader)
    for epoch in range(first, options.epochs):
        for rows in loader:
            optimizer.zero_grad()
            accelerator.backward((net(rows) - rows.sum(dim=1, keepdim=True)).square().mean())
            optimizer.step()
            step += 1
            accelerator.print("step", step, flush=True)
        accelerator.save_state(options.folder / f"epoch={epoch}")
    weights = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        torch.save(weights, options.folder / "weights.pt")
        print("trained", step, "steps in all")
    accelerator.end_training()


if __name__ == "__main__":
    main()
