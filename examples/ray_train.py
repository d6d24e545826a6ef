"""Train a small model with Ray Train on two workers; with --recipe, average its gradients by gradwire.

python examples/ray_train.py --recipe int4
gradwire run --recipe int4 -- examples/ray_train.py
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn


def train_rank(options: dict[str, Any]) -> None:
    """Train on one worker; every worker saves its own state."""
    rank, size = train.get_context().get_world_rank(), train.get_context().get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(128, 16)
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = None
    if options["recipe"]:
        import gradwire

        wire = gradwire.attach(model, options["recipe"])
    first = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            weights, optimizer_state, first, wire_state = torch.load(Path(folder) / f"rank{rank}.pt")
        model.module.load_state_dict(weights)
        optimizer.load_state_dict(optimizer_state)
        if wire is not None:
            wire.load_state_dict(wire_state)
    for epoch in range(first, options["epochs"]):
        for batch in rows.split(8)[rank::size]:
            optimizer.zero_grad()
            (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean().backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            states = [model.module.state_dict(), optimizer.state_dict(), epoch + 1]
            states.append(None if wire is None else wire.state_dict())
            torch.save(states, Path(folder) / f"rank{rank}.pt")
            sent = 0 if wire is None else wire.stats().bytes_sent
            train.report({"epoch": epoch + 1, "bytes_sent": sent}, checkpoint=Checkpoint(folder))
        if options["fail_after"] == epoch + 1 and first == 0:
            raise RuntimeError("this worker was told to fail")


def main() -> None:
    """Train, and save the weights of the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", help="average gradients by this recipe of gradwire")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"))
    parser.add_argument("--fail-after", type=int, default=0, help="fail once after so many epochs")
    options = parser.parse_args()

    ray.init(num_cpus=4, include_dashboard=False)
    trainer = TorchTrainer(
        train_rank,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(options.folder.resolve()),
            failure_config=train.FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        weights = torch.load(Path(folder) / "rank0.pt")[0]
    torch.save(weights, options.folder / "weights.pt")
    print("trained", result.metrics)


if __name__ == "__main__":
    main()
