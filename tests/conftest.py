"""Set before anything imports Triton or asks the resolver."""

import os

import pytest

# Triton's interpreter then runs the CUDA kernels on CPU.
os.environ["TRITON_INTERPRET"] = "1"
# A connection to a torch store asks for its peer's name; where the question gets lost, glibc waits 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


@pytest.fixture
def one_thread():
    """Products of threads are added in another order, and threads that wait for each other take long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
