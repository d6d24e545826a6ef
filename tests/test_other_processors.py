"""Ranks on processors of other kinds: what all ranks compute themselves has the same bits on each."""

import hashlib
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from gradwire import recipe
from gradwire.buckets import Memory
from gradwire.exchanges import Context, Scratch
from gradwire.ops.cpu import orthogonal
from gradwire.peers import SingleRankGroup
from tests.drawn_buckets import layout_of

# Neither the vectors of AVX nor fused multiply-adds, for numba's kernels and for torch.
OTHER = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2", "ATEN_CPU_CAPABILITY": "default"}


def start():
    """Return the random vectors from which low rank starts."""
    options, layout = recipe("acp:rank=4").exchange, layout_of((300, 200), (40, 70))
    flat = torch.zeros(layout.numel)
    context = Context(SingleRankGroup(), Scratch(), 1.0, layout, Memory())
    return options._step(options.plan(layout), flat, flat, context)._draw("left", 0)


def bases(rank):
    """Return what becomes of vectors that differ so little that rounding shows."""
    random = np.random.default_rng(rank)
    for _ in range(20):
        vectors = random.integers(-(1 << 20), 1 << 20, (rank, 4099)).astype(np.float32)
        vectors[1:] = vectors[0] + vectors[1:] * np.float32(2.0**-17)
        orthogonal.orthogonalize(vectors, vectors, False)
        assert np.isfinite(vectors).all()
        yield vectors


def digests():
    everything = {"start": [start().numpy()], "few vectors": bases(4), "many vectors": bases(9)}
    return {
        name: hashlib.sha256(b"".join(map(np.ndarray.tobytes, found))).hexdigest()
        for name, found in everything.items()
    }


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this kind")
def test_the_bases_of_low_rank_are_the_same_on_every_processor(tmp_path):
    command = [sys.executable, "-c", "import tests.test_other_processors as t; print(t.digests())"]
    environment = {**os.environ, **OTHER, "NUMBA_CACHE_DIR": str(tmp_path)}
    there = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert there.returncode == 0, there.stderr
    assert there.stdout.strip() == str(digests())
