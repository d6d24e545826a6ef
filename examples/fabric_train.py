"""Train a small model with Lightning's Fabric on two ranks; with --recipe, by gradwire.

python examples/fabric_train.py --recipe int4
gradwire run --recipe int4 -- examples/fabric_train.py
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train, and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", help="average gradients by this recipe of gradwire")
    parser.add_argument("--devices", type=int, default=2, help="ranks on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/fabric"))
    parser.add_argument("--resume", help="a checkpoint to resume from")
    options = parser.parse_args()

    strategy: Any = "ddp"
    if options.recipe:
        from gradwire.adapters.fabric import WireStrategy

        strategy = WireStrategy(options.recipe)
    fabric = Fabric(devices=options.devices, num_nodes=options.nodes, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(128, 16)), batch_size=8))
    state = {"net": net, "optimizer": optimizer, "epoch": 0, "step": 0}
    if options.resume:
        fabric.load(options.resume, state)
    for epoch in range(state["epoch"], options.epochs):
        for (rows,) in loader:
            optimizer.zero_grad()
            fabric.backward((net(rows) - rows.sum(dim=1, keepdim=True)).square().mean())
            optimizer.step()
            state["step"] += 1
            fabric.print("step", state["step"], flush=True)
        state["epoch"] = epoch + 1
        fabric.save(options.folder / f"epoch={epoch}.ckpt", state)
    if fabric.is_global_zero:
        torch.save(net.module.state_dict(), options.folder / "weights.pt")
        print("trained", state["step"], "steps in all")


if __name__ == "__main__":
    main()
