"""Memory that recipes hold beside a model: state that a checkpoint saves, and scratch memory for messages.

    python benchmarks/memory.py                    two Gloo ranks on this machine
    python benchmarks/memory.py --device cuda      two NCCL ranks, which may share one GPU
    python benchmarks/memory.py --rows int4 powersgd --bucket-mb 8

Each recipe trains a model of its own for a few steps. Its memory is that of all tensors afterwards, less that
of the same model with `noop`. The peak is the most that the device held during a step, counted the same way;
on CPU torch does not count it.
"""

import argparse
import copy
import gc
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.headroom import Machine, Workload
from gradwire.testing import run_ranks
from gradwire.torch_private import tree_map_only
from groups import open_group, rank_environment
from steps import CPU, GPU, print_table

# In the first two steps, all parameters are in one bucket.
NUM_STEPS = 5
DEFAULT_ROWS = ["fp32", "bf16", "int8", "int4", "int4:residual=bf16", "int2", "sign", "powersgd", "acp"]


def held_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors of this process on ``device``."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    # `type` and not isinstance: some objects answer for others.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = (each.untyped_storage() for each in tensors if each.layout == torch.strided)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def state_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of all tensors in a wire's state."""
    sizes: list[int] = []
    tree_map_only(Tensor, lambda tensor: sizes.append(tensor.nbytes), state)
    return sum(sizes)


def measure(
    rank: int, rows: list[str], workload: Workload, device_type: str, options: dict[str, Any]
) -> dict[str, tuple[int, int, int]]:
    """Return each recipe's state, other memory, and peak, in bytes."""
    device, group = torch.device(device_type), open_group(rank, device_type)
    built = workload.build().to(device)
    found: dict[str, tuple[int, int, int]] = {}
    # The first row also holds what libraries keep from then on, such as workspaces of cuBLAS.
    for row in ["noop", "noop", *rows]:
        before = held_bytes(device)
        model = DistributedDataParallel(copy.deepcopy(built.model), process_group=group, **options)
        wire = gradwire.attach(model, row)
        for step in range(NUM_STEPS):
            if device_type == "cuda" and step == NUM_STEPS - 1:
                torch.cuda.reset_peak_memory_stats()
            model.zero_grad()
            built.step_loss(model).backward()
        held = held_bytes(device) - before
        peak = torch.cuda.max_memory_allocated() - before if device_type == "cuda" else 0
        found[row] = state_bytes(wire.state_dict()), held, peak
        wire.detach()
        del model, wire
    _, held, peak = found.pop("noop")
    return {row: (state, own - held - state, most - peak) for row, (state, own, most) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", nargs="+", default=DEFAULT_ROWS, help="recipes")
    parser.add_argument("--bucket-mb", type=float, help="DDP's bucket_cap_mb; by default DDP's own")
    options = parser.parse_args()
    workload = CPU if options.device == "cpu" else GPU
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{Machine.here()}, Gloo"
    of_ddp = {} if options.bucket_mb is None else {"bucket_cap_mb": options.bucket_mb}
    print(f"{where}; 2 ranks; {workload}; torch {torch.__version__}")
    arguments = options.rows, workload, options.device, of_ddp
    with rank_environment(2, options.device) as environment:
        found = run_ranks(measure, 2, 600, args=arguments, environment=environment)[0]
    whole = 4 * workload.num_parameters
    cells = {row: [f"{size / whole:.2f}" if size else "" for size in sizes] for row, sizes in found.items()}
    header = ["bytes, over those of the parameters", "state", "scratch", "peak"]
    print_table(header, [[f"`{row}`", *own] for row, own in cells.items()])


if __name__ == "__main__":
    main()
