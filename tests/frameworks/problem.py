"""A small problem for every framework, and the plain loop that each must match bit for bit."""

import contextlib
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire


def set_torchrun_variables():
    """Set what torchrun sets besides the ranks' own variables: Accelerate asks for it."""
    os.environ.update(LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


if "RANK" in os.environ:
    set_torchrun_variables()

NUM_STEPS = 4
"""Steps in an epoch."""
BATCH = 4
RECIPE = "int4:rounding=stochastic"
BUCKET_MB = 0.002


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def make_rows(num_ranks=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_STEPS * BATCH * num_ranks, 8, generator=generator)


def batches_of(rank, num_ranks=2):
    """The batches of one rank, as an iterable over a loader gives them whose batches go to ranks in turn."""
    return list(make_rows(num_ranks).split(BATCH))[rank::num_ranks]


def loss_of(output):
    return output.square().mean()


def make_optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def flat(net):
    """Return all parameters as one tensor, whole if they are sharded."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole]).clone()


def train_plainly(
    rank, epochs, recipe=RECIPE, accumulate=1, clip=None, dtype=None, bucket_mb=BUCKET_MB, scaler=None
):
    """Train with DDP and `gradwire.attach` alone; return the parameters. Without buckets, shard by FSDP2."""
    net = make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_mb) if bucket_mb else fully_shard(net)
    optimizer = make_optimizer(model)
    options = {"grad_scaler": scaler} if scaler is not None else {}
    wire = gradwire.attach(model, recipe, **options)
    for _ in range(epochs):
        for index, batch in enumerate(batches_of(rank)):
            is_last = (index + 1) % accumulate == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
                    loss = loss_of(model(batch).float() if dtype else model(batch)) / accumulate
                (scaler.scale(loss) if scaler is not None else loss).backward()
            if is_last:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer) if scaler is not None else optimizer.step()
                if scaler is not None:
                    scaler.update()
                optimizer.zero_grad()
    wire.detach()
    return flat(model)


class Heard(logging.Handler):
    """Collect the messages that gradwire logs inside a block."""

    def __enter__(self):
        self.text = ""
        logging.getLogger("gradwire").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("gradwire").removeHandler(self)

    def emit(self, record):
        self.text += record.getMessage() + "\n"


def damages(rank, folder):
    """Damage the states in a folder in one way after the other, and yield what an error must say."""
    dist.barrier()
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    cases = {
        "rank1.pt, the state of rank 1 of 2, is missing": {"rank1.pt": None},
        "rank1.pt cannot be read": {"rank1.pt": b"nonsense"},
        "rank1.pt is the state of rank 0 of 2": {"rank1.pt": contents["rank0.pt"]},
    }
    for message, change in cases.items():
        dist.barrier()
        for name, content in {**contents, **change}.items():
            if rank == 0:
                (folder / name).unlink(missing_ok=True)
                if content is not None:
                    (folder / name).write_bytes(content)
        dist.barrier()
        yield message


def assert_taken_over(memory, folder, rank, num_saved):
    """Check that this rank has the mean of what the ranks of another run had held back."""
    saved = [torch.load(folder / f"rank{r}.pt")["state"]["memory"][f"rank{r}"] for r in range(num_saved)]
    (key,) = saved[0]
    for name, tensor in memory[f"rank{rank}"][key].items():
        mean = sum(each[key][name].double() for each in saved) / num_saved
        assert torch.equal(tensor, mean.float())
        assert tensor.any()


def all_equal(tensor):
    """True if every rank has these bits."""
    other = tensor.clone()
    dist.broadcast(other, 0)
    same = torch.tensor(float(torch.equal(other, tensor)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)
