"""Errors keep their types and gain a place, and an error in an exchange reaches every rank."""

import pickle
import subprocess
import sys

import pytest
import torch

import gradwire
from gradwire.errors import Place, locate
from gradwire.testing import run_ranks
from tests.models import backward, small_model
from tests.odd_errors import Final, NeedsMore, Record


class BrokenExchange:
    communicates = True
    kernels = frozenset()

    def __init__(self, bad_rank, error):
        self.bad_rank = bad_rank
        self.error = error

    def __repr__(self):
        return "BrokenExchange()"

    def shared_bytes(self, layout, step):
        return 0

    def rounds(self, flat, context):
        assert not torch.is_grad_enabled()
        self.num_runs = getattr(self, "num_runs", 0) + 1
        if context.group.rank == self.bad_rank and self.num_runs == 4:
            raise self.error
        yield from gradwire.fp32().exchange.rounds(flat, context)


def job_broken_exchange(rank):
    model = small_model()
    error = FloatingPointError("overflow in rank's own arithmetic")
    wire = gradwire.attach(model, gradwire.Recipe("broken", BrokenExchange(1, error)))
    backward(model)
    with pytest.raises(gradwire.WireError) as caught:
        for _ in range(3):
            backward(model)
    assert "rank 1, step " in str(caught.value)
    assert "hook broken: FloatingPointError: overflow in rank's own arithmetic" in str(caught.value)
    assert isinstance(caught.value, FloatingPointError if rank == 1 else gradwire.PeerError)
    # Detached, the model averages again; attached anew, too.
    wire.detach()
    assert wire.failure is caught.value
    backward(model)
    with gradwire.attach(model, "fp32") as wire:
        backward(model)
    wire.detach()
    assert wire.failure is None


def test_an_error_in_an_exchange_is_raised_on_every_rank_and_can_be_left_behind():
    run_ranks(job_broken_exchange, 3, timeout=180)


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (OSError(28, "No space left on device"), {"errno": 28, "strerror": "No space left on device"}),
        (FileNotFoundError(2, "gone", "here"), {"errno": 2, "filename": "here"}),
        (subprocess.CalledProcessError(3, ["make"]), {"returncode": 3, "cmd": ["make"]}),
        (UnicodeDecodeError("utf8", b"x", 0, 1, "why"), {"encoding": "utf8", "reason": "why"}),
        (NeedsMore(Record()), {"number": 7}),
        (KeyError("lost"), {}),
        (MemoryError("none left"), {}),
        (RuntimeError("one", 2), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_keeps_its_type_and_attributes_and_gains_a_place(error, attributes):
    error.seen = "by the user"
    located = locate(error, Place(1, 2, 3, "mine"))
    assert isinstance(located, gradwire.WireError)
    assert isinstance(located, type(error))
    assert str(located) == f"rank 1, step 2, bucket 3, hook mine: {type(error).__name__}: {error}"
    for name, value in {**attributes, "seen": "by the user", "args": error.args}.items():
        assert getattr(located, name) == value
    assert located.__cause__ is error
    assert str(pickle.loads(pickle.dumps(located))) == str(located)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no groups of exceptions yet")
def test_a_group_of_errors_stays_one():
    group = ExceptionGroup("two", [ValueError("one"), KeyError("other")])  # noqa: F821
    located = locate(group, Place(1, 2, 3, "mine"))
    assert isinstance(located, type(group))
    assert located.exceptions == group.exceptions
    assert str(located).endswith("hook mine: ExceptionGroup: two (2 sub-exceptions)")


def test_an_error_that_cannot_be_copied_is_told_all_the_same():
    located = locate(Final("alone"), Place(1, 2, 3, "mine"))
    assert type(located) is gradwire.WireError
    assert str(located) == "rank 1, step 2, bucket 3, hook mine: Final: alone"
