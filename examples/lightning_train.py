"""Train a small model with Lightning on two ranks; with --recipe, average its gradients by gradwire.

python examples/lightning_train.py --recipe int4
gradwire run --recipe int4 -- examples/lightning_train.py
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    """A small network that learns to add."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        (rows,) = batch
        loss = (self.net(rows) - rows.sum(dim=1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ShowSteps(pl.Callback):
    """Prints each step, on rank 0."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Print the number of the step."""
        if trainer.is_global_zero:
            print("step", trainer.global_step, flush=True)


def main() -> None:
    """Train, and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", help="average gradients by this recipe of gradwire")
    parser.add_argument("--devices", type=int, default=2, help="ranks on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--resume", help="a checkpoint to resume from")
    options = parser.parse_args()

    strategy: Any = "ddp"
    if options.recipe:
        from gradwire.adapters.lightning import WireStrategy

        strategy = WireStrategy(options.recipe)
    pl.seed_everything(0)
    module = Module()
    loader = DataLoader(TensorDataset(torch.randn(128, 16)), batch_size=8)
    trainer = pl.Trainer(
        devices=options.devices,
        num_nodes=options.nodes,
        strategy=strategy,
        max_epochs=options.epochs,
        default_root_dir=options.folder,
        logger=False,
        callbacks=[ShowSteps(), ModelCheckpoint(options.folder, "{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
    )
    trainer.fit(module, loader, ckpt_path=options.resume)
    if trainer.is_global_zero:
        torch.save(module.net.state_dict(), options.folder / "weights.pt")
        print("trained", trainer.global_step, "steps in all")


if __name__ == "__main__":
    main()
