"""Compile all Triton kernels for a GPU that need not be there: ``python -m tests.compile_kernels 90 80``.

The arguments are compute capabilities. Virtual ranks average a small model by every recipe. Instead of being
launched, each kernel is compiled for the arguments it gets.
"""

import sys

import torch
import triton
from benchmarks.symmetric_kernel import OneKernel
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import gradwire
from gradwire import ops
from gradwire.ops.cuda import blocks, casts, low_rank, rotated
from gradwire.testing import VirtualRanks

RECIPES = [
    "bf16",
    "fp16",
    "int8",
    "int8:feedback=true,residual=bf16",
    "fp8:rounding=stochastic",
    "int4",
    "int4:feedback=false,rotated=true",
    "sign:tables=same",
    "sign:rotated=false",
    "int2:tables=same",
    "int2:bits=1+2,tables=same",
    "int3:tables=same",
    "powersgd",
    "powersgd:rank=4",
    "acp",
]
# Shared memory that a block may have on the smallest of recent GPUs.
MAX_SHARED_BYTES = 64 * 1024
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
}


class Compiler:
    """Take the place of `JITFunction.run`."""

    def __init__(self, capabilities):
        self.targets = [GPUTarget("cuda", capability, 32) for capability in capabilities]
        self.compiled = set()

    def run(self, kernel, *args, grid, warmup, **kwargs):
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        options = {name: given.pop(name) for name in list(given) if name not in kernel.arg_names}
        constants = {p.name for p in kernel.params if p.is_constexpr}
        signature = {
            name: "constexpr" if name in constants else type_of(given[name]) for name in kernel.arg_names
        }
        constexprs = {(kernel.arg_names.index(name),): given[name] for name in constants}
        key = (kernel.__module__, kernel.__name__, str(signature), str(constexprs), str(options))
        if key in self.compiled:
            return
        self.compiled.add(key)
        for target in self.targets:
            source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
            made = triton.compile(source, target=target, options=options)
            if made.metadata.shared > MAX_SHARED_BYTES:
                raise AssertionError(f"{key} takes {made.metadata.shared} bytes of shared memory")


def type_of(value):
    """Return Triton's name for the type of a kernel's argument."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def train(recipe, dtype, world_size):
    model = nn.Sequential(nn.Linear(600, 300), nn.Linear(300, 100)).to(dtype)
    ranks = VirtualRanks(model, recipe, world_size=world_size)
    for _ in range(3):
        for rank in range(world_size):
            with ranks.backward_of(rank):
                model(torch.randn(2, 600, dtype=dtype)).float().square().mean().backward()
        ranks.average()


def average_in_one_kernel(recipe, world_size):
    form = gradwire.recipe(recipe).exchange.codec.format
    bounds = [(0, 1000)] if world_size == 2 else [(r, r + 1000) for r in range(0, 1000 * world_size, 1000)]
    memories = torch.zeros(world_size, dtype=torch.int64)
    OneKernel(form, 0, memories, bounds, stride=2048, num_programs=1).average(torch.zeros(bounds[-1][1]))


def main(capabilities):
    compiler = Compiler(capabilities)
    JITFunction.run = lambda kernel, *args, **kwargs: compiler.run(kernel, *args, **kwargs)
    # Choose the kernels for CUDA, whatever the device.
    ops._blocks = lambda *args: blocks
    ops._rotated = lambda *args: rotated
    ops.low_rank = lambda *args: low_rank
    ops._casts = lambda *args: casts
    for recipe in RECIPES:
        for dtype in (torch.float32, torch.bfloat16):
            for world_size in (2, 3):
                train(recipe, dtype, world_size)
    for recipe in ("int8", "fp8", "int4", "sign:rotated=false"):
        for world_size in (2, 4):
            average_in_one_kernel(recipe, world_size)
    print(f"compiled {len(compiler.compiled)} kernels")


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
