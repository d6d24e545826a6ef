"""A model and a trainer for the tests of Transformers."""

from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer

from tests.frameworks.problem import loss_of, make_net


class Model(nn.Module):
    """A model as the Trainer wants one."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, rows):
        output = self.net(rows)
        return {"loss": loss_of(output.float()), "output": output}


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)
