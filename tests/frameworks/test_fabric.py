"""Lightning's Fabric: the strategy trains as the plain loop does, and resumes exactly."""

import shutil

import pytest
import torch
from lightning.fabric import Fabric

import gradwire
from gradwire.adapters.fabric import LocalSGDStrategy, WireStrategy
from tests.frameworks.problem import (
    BUCKET_MB,
    NUM_STEPS,
    RECIPE,
    Heard,
    all_equal,
    batches_of,
    damages,
    flat,
    loss_of,
    make_net,
    make_optimizer,
    train_plainly,
)

WAYS = {
    "wire": lambda: WireStrategy(RECIPE, bucket_cap_mb=BUCKET_MB),
    "local": lambda: LocalSGDStrategy(period=3, recipe=RECIPE, outer=gradwire.DiLoCo()),
}


class Run:
    """A loop as users write it."""

    def __init__(self, way="wire", **options):
        strategy = WAYS[way]()
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
        self.fabric.launch()
        net = make_net()
        self.model, self.optimizer = self.fabric.setup(net, make_optimizer(net))
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, epochs, accumulate=1, clip=None):
        for _ in range(epochs):
            for index, batch in enumerate(batches_of(self.fabric.global_rank)):
                is_last = (index + 1) % accumulate == 0
                with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                    self.fabric.backward(loss_of(self.model(batch)) / accumulate)
                if is_last:
                    if clip is not None:
                        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=clip)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return flat(self.model)


def job_bits(rank):
    run = Run()
    assert torch.equal(run.train(3), train_plainly(rank, 3))
    assert run.fabric.strategy.wires[0].stats().num_steps == 3 * NUM_STEPS
    figures = run.fabric.strategy.metrics()
    assert figures["gradwire/total_bytes_sent"] == 3 * NUM_STEPS * figures["gradwire/bytes_sent"] > 0
    expected = train_plainly(rank, 2, accumulate=2, clip=0.01)
    assert torch.equal(Run().train(2, accumulate=2, clip=0.01), expected)
    assert torch.equal(Run(precision="bf16-mixed").train(2), train_plainly(rank, 2, dtype=torch.bfloat16))


def test_training_ends_with_the_bits_of_the_plain_loop(two_ranks):
    two_ranks.run(job_bits)


def job_resume(rank, folder, way):
    whole = Run(way).train(4)
    first = Run(way)
    first.train(2)
    path = folder / "state.ckpt"
    first.fabric.save(path, first.state)
    resumed = Run(way)
    resumed.fabric.load(path, resumed.state)
    assert torch.equal(resumed.train(2), whole)
    for message in damages(rank, folder / "state.ckpt.gradwire"):
        with pytest.raises(ValueError, match=message):
            Run(way).fabric.load(path, resumed.state)
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder / "state.ckpt.gradwire")
    torch.distributed.barrier()
    other = Run(way)
    with Heard() as heard:
        other.fabric.load(path, other.state)
    assert ("it was made without gradwire" in heard.text) == (rank == 0)
    assert not torch.equal(other.train(2), whole)


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_stopped(two_ranks, tmp_path, way):
    two_ranks.run(job_resume, tmp_path, way)


def job_local(rank):
    run = Run("local")
    assert not all_equal(run.train(2))  # 8 steps: two periods of 3, and 2 steps more
    run.fabric.strategy.average()
    assert all_equal(flat(run.model))
    assert run.fabric.strategy.wires[0].stats().num_steps == 3
    with pytest.raises(ValueError, match="one optimizer for each module"):
        run.fabric.setup_optimizers(make_optimizer(make_net()))


def test_local_sgd_averages_by_period_and_at_the_end(two_ranks):
    two_ranks.run(job_local)
