"""Marks for tests of what an older torch cannot do."""

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

needs_gloo_of_bf16 = pytest.mark.skipif(
    TORCH < (2, 10), reason="Gloo of this torch broadcasts no bf16, so DDP makes no such model on it"
)
needs_gloo_that_frees_the_gil = pytest.mark.skipif(
    TORCH < (2, 8), reason="a Gloo group of this torch holds the GIL while it waits for its threads to end"
)
needs_names_of_gloo_threads = pytest.mark.skipif(
    TORCH < (2, 11),
    reason="threads of Gloo groups of this torch have no names, so nothing waits for them at exit",
)
