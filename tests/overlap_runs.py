"""Models and runs for tests of overlapped optimizers."""

import pytest
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.local_runs import flat, loss_of, net


def model_of(**options):
    return DistributedDataParallel(net(), bucket_cap_mb=0.001, **options)


def groups(module):
    """Two param groups: weights decay, biases do not and learn faster."""
    weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.2}]


FAILING_STEP = 2  # after DDP has rebuilt its buckets, which it does with a collective of its own


def train_until_it_fails(rank, model, at_step, text, optimizer=None):
    before = None
    with pytest.raises(gradwire.WireError, match=text):
        for step in range(5):  # a rank where all went well learns of it at the next step
            at_step(step)
            before = flat(model)
            loss_of(model, rank, step).backward()
            if optimizer is not None:
                optimizer.step()
    return before
