"""Models that frameworks shard by FSDP2: adapters train as the plain loop does, and resume exactly."""

import shutil

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import gradwire
from gradwire.adapters import accelerate as accelerate_adapter
from gradwire.adapters import transformers as transformers_adapter
from gradwire.adapters.lightning import WireCallback
from tests.frameworks.lightning_runs import Module, make_loader, make_trainer
from tests.frameworks.problem import (
    BATCH,
    NUM_STEPS,
    RECIPE,
    batches_of,
    flat,
    loss_of,
    make_net,
    make_optimizer,
    make_rows,
    train_plainly,
)
from tests.frameworks.trainer_runs import InOrder, Model


def pretend_gpus():
    """Let Accelerate use FSDP on CPU too, where it trains by DDP whatever it is given."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class AccelerateRun:
    def __init__(self, way="after", version=2):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState(cpu=True)
        pretend_gpus()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        net = make_net()
        given = net, make_optimizer(net), DataLoader(make_rows(), batch_size=BATCH)
        if way == "before":
            self.wire = accelerate_adapter.attach(self.accelerator, net, RECIPE)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(*given)
        if way == "after":
            self.wire = accelerate_adapter.attach(self.accelerator, self.model, RECIPE)

    def train(self, epochs):
        for _ in range(epochs):
            for batch in self.loader:
                self.accelerator.backward(loss_of(self.model(batch)))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return flat(self.model)


def resume_accelerate(way, folder):
    run = AccelerateRun(way)
    run.accelerator.load_state(folder)
    return run.train(1), run.wire


def job_accelerate(rank, folder, way):
    whole = AccelerateRun(way).train(3)
    assert torch.equal(whole, train_plainly(rank, 3, bucket_mb=None))
    first = AccelerateRun(way)
    first.train(2)
    first.accelerator.save_state(folder)
    assert_resumes(rank, folder / "gradwire", whole, resume_accelerate, way, folder)


def assert_resumes(rank, states, whole, resume, *args):
    """Check that ``resume(*args)`` goes on as if the run had not stopped, and that the states make it so."""
    torch.distributed.barrier()
    resumed, wire = resume(*args)
    assert torch.equal(resumed, whole)
    assert wire.stats().num_steps == NUM_STEPS
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(states)
    torch.distributed.barrier()
    assert not torch.equal(resume(*args)[0], whole)


@pytest.mark.parametrize("way", ["before", "after"])
def test_accelerate(two_ranks, tmp_path, way):
    two_ranks.run(job_accelerate, tmp_path, way)


def job_first_fsdp(rank):
    with pytest.raises(TypeError, match=r"trains by FSDP.*FullyShardedDataParallelPlugin\(fsdp_version=2\)"):
        AccelerateRun("before", version=1)


def test_accelerate_with_the_first_fsdp_is_refused(two_ranks):
    two_ranks.run(job_first_fsdp)


class ShardedTrainer(InOrder):
    """With FSDP the Trainer takes no optimizer from outside."""

    def create_optimizer(self, *args):
        self.optimizer = make_optimizer(self.model)
        return self.optimizer


def train_transformers(folder, epochs, checkpoint=None, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        lr_scheduler_type="constant",
        fsdp=True,
        fsdp_config={"auto_wrap_policy": "NO_WRAP"},
        disable_tqdm=True,
        **{"max_grad_norm": 0.0, "save_strategy": "no", "logging_strategy": "no", "report_to": [], **options},
    )
    pretend_gpus()
    trainer = ShardedTrainer(Model(), arguments, train_dataset=[{"rows": row} for row in make_rows()])
    wire = transformers_adapter.attach(trainer, RECIPE)
    trainer.train(resume_from_checkpoint=checkpoint)
    return flat(trainer.model), wire


def job_transformers(rank, folder):
    whole, _ = train_transformers(folder / "whole", 3)
    assert torch.equal(whole, train_plainly(rank, 3, bucket_mb=None))
    train_transformers(folder, 2, save_strategy="epoch")
    checkpoint = folder / f"checkpoint-{2 * NUM_STEPS}"
    assert_resumes(rank, checkpoint / "gradwire", whole, train_transformers, folder, 3, str(checkpoint))


def test_transformers(two_ranks, tmp_path):
    two_ranks.run(job_transformers, tmp_path)


class ShardedModule(Module):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def fit(rank, folder, epochs, checkpoint=None, save=None):
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    callback, module = WireCallback(RECIPE), ShardedModule()
    trainer = make_trainer(strategy, folder, epochs, callbacks=[callback])
    trainer.fit(module, make_loader(rank), ckpt_path=checkpoint)
    if save is not None:
        trainer.save_checkpoint(save)
    return flat(module), callback.wire


def job_lightning(rank, folder):
    whole, _ = fit(rank, folder, 3)
    assert torch.equal(whole, train_plainly(rank, 3, bucket_mb=None))
    checkpoint = folder / "state.ckpt"
    fit(rank, folder, 2, save=checkpoint)
    assert_resumes(rank, folder / "state.ckpt.gradwire", whole, fit, rank, folder, 3, checkpoint)


def test_lightning(two_ranks, tmp_path):
    two_ranks.run(job_lightning, tmp_path)


def shard_whole(net, mesh):
    return fully_shard(net, mesh=mesh["data_parallel"])


def job_fabric(rank):
    strategy = FabricModelParallel(shard_whole, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(make_net())
    optimizer = fabric.setup_optimizers(make_optimizer(model))
    gradwire.attach(model.module, RECIPE)
    for _ in range(3):
        for batch in batches_of(rank):
            fabric.backward(loss_of(model(batch)))
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(flat(model), train_plainly(rank, 3, bucket_mb=None))


def test_fabric(two_ranks):
    two_ranks.run(job_fabric)
