"""A program that ends by an exception of its own tells the other ranks why."""

import re
import sys

import pytest
import torch.distributed as dist

import gradwire
from gradwire.peers import is_unreachable
from tests.models import backward, small_model


def load():
    raise ValueError("an odd batch")


def check_told(rank):
    """Ranks 1 and 2 of three train a model; the error names rank 2, which is rank 1 of their group."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    model = small_model(process_group=group)
    wire = gradwire.attach(model, "int8")
    for _ in range(2):  # before the second, DDP rebuilds its buckets by a collective of its own
        backward(model)
    if rank == 2:
        try:
            load()
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)  # as Python calls it at the end
        wire.detach()
        return
    with pytest.raises(gradwire.PeerError) as caught:
        backward(model)
    told = r"rank 2: its program ended with ValueError: an odd batch, at \S+test_last_words\.py:\d+ in load"
    assert re.fullmatch(told, str(caught.value))


def test_the_others_raise_its_exception_and_the_line(three_ranks):
    three_ranks.run(check_told)


def test_errors_that_only_say_that_a_rank_is_gone_are_known():
    gone = "Connection closed by peer", "Connection reset by peer", "Timed out waiting 1ms", "Broken pipe"
    assert all(is_unreachable(RuntimeError(f"[pair.cc:1] {text} [127.0.0.1]:80")) for text in gone)
    assert not is_unreachable(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_unreachable(ValueError("Connection closed"))
