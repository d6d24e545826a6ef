"""Train a small transformer on random data. The script does not use gradwire.

torchrun --nproc-per-node 2 examples/train.py
gradwire lab --rate 100mbit -- gradwire run --recipe bf16 -- examples/train.py --steps 20
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train, and print the median step time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(options.width, 8, 4 * options.width, batch_first=True)
    model = DistributedDataParallel(nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    times = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        tokens = torch.randn(2, 32, options.width)
        optimizer.zero_grad()
        (model(tokens) - tokens.roll(1, dims=1)).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        median = statistics.median(times[3:] or times)
        print(f"{options.steps} steps, {1e3 * median:.1f} ms each")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
