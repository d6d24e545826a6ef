"""A module and trainers for the tests of Lightning."""

import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.problem import BATCH, loss_of, make_net, make_optimizer, make_rows

warnings.filterwarnings("ignore", module="lightning")


class Module(pl.LightningModule):
    def __init__(self, compiled=False):
        super().__init__()
        self.net = make_net()
        self.call = torch.compile(self.net, backend="eager") if compiled else self.net
        self.num_validated = 0

    def training_step(self, batch, index):
        loss = loss_of(self.call(batch[0]).float())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.num_validated += 1
        self.log("val_loss", torch.tensor(1.0))  # never gets better

    def configure_optimizers(self):
        return make_optimizer(self.net)


class Notes(Logger):
    """A logger that keeps everything."""

    name, version = "notes", 0

    def __init__(self):
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append(dict(metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


def make_loader(rank, num_ranks=2):
    """Batches that go to ranks in turn, as in the plain loop."""
    rows = make_rows(num_ranks)
    own = list(torch.arange(len(rows)).split(BATCH))[rank::num_ranks]
    return DataLoader(TensorDataset(rows), batch_sampler=[batch.tolist() for batch in own])


def make_trainer(strategy, folder, epochs, **options):
    options = {"logger": False, "enable_checkpointing": False, **options}
    return pl.Trainer(
        accelerator="cpu",
        devices=options.pop("devices", 2),
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
