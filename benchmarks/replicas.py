"""Local SGD for `convergence.py`, on real ranks, because each worker has parameters of its own.

A row is named LocalSGD:period=N or DiLoCo:period=N, after gradwire.LocalSGD and gradwire.DiLoCo.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.testing import run_ranks, send_message
from optimizers import OPTIMIZERS
from runs import Setting

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from lm import LM, corpus, pieces, starts
from train_lm import learning_rate

OUTER: dict[str, Callable[[], gradwire.DiLoCo | None]] = {"LocalSGD": lambda: None, "DiLoCo": gradwire.DiLoCo}
TIMEOUT_S = 1800.0


def period_of(name: str) -> int | None:
    """Return the number of steps between two averagings in a row of this name; None for other rows."""
    kind, _, option = name.partition(":period=")
    if kind not in OUTER:
        return None
    if not option.isdigit() or int(option) < 1:
        raise ValueError(f"a row of local SGD is called {kind}:period=8, not {name}")
    return int(option)


def train(
    setting: Setting, name: str, seed: int, num_held_out: int, every: int, tell: Callable[[int, float], None]
) -> tuple[dict[int, float], float, int, float]:
    """Train; return held-out losses by step, the busiest rank's bytes per step, parameters and seconds."""
    last = float("nan")

    def on_message(rank: int, message: tuple[int, float | None]) -> None:
        nonlocal last
        done, loss = message
        last = last if loss is None else loss
        tell(done, last)

    begin = time.monotonic()
    args = setting, name, seed, num_held_out, every
    found = run_ranks(run_rank, setting.workers, TIMEOUT_S, args=args, on_message=on_message)
    curve, num_parameters = found[0][0], found[0][2]
    sent = max(num_bytes for _, num_bytes, _ in found) / setting.steps
    return curve, sent, num_parameters, time.monotonic() - begin


def run_rank(
    rank: int, setting: Setting, name: str, seed: int, num_held_out: int, every: int
) -> tuple[dict[int, float], int, int]:
    """Train on one rank; the first rank evaluates, just after an averaging."""
    text, held_out = corpus()
    torch.manual_seed(seed)
    net = LM(setting.width, setting.layers, setting.length)
    model = DistributedDataParallel(net)
    optimizer = OPTIMIZERS[setting.optimizer](list(net.parameters()))
    places = starts(text, (setting.steps, setting.workers, setting.batch), setting.length, seed)
    period = period_of(name)
    assert period is not None
    outer = OUTER[name.partition(":")[0]]()
    curve = {0: evaluate(net, held_out, num_held_out, setting.length)} if rank == 0 else {}
    with gradwire.LocalSGD(model, optimizer, period=period, outer=outer) as local:
        for step in range(setting.steps):
            optimizer.zero_grad()
            model(*pieces(text, places[step, rank], setting.length)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, setting.steps, setting.lr)
            optimizer.step()
            done = step + 1
            if not local.step() and done == setting.steps:
                local.average()
            if rank == 0:
                if done == setting.steps or (done % every == 0 and done % period == 0):
                    curve[done] = evaluate(net, held_out, num_held_out, setting.length)
                send_message((done, curve.get(done)))
        num_bytes = local.stats().bytes_sent
    dist.barrier()
    return curve, num_bytes or 0, sum(p.numel() for p in net.parameters())


def evaluate(net: nn.Module, held_out: Tensor, num_pieces: int, length: int) -> float:
    places = starts(held_out, (num_pieces,), length, 0)
    with torch.no_grad():
        losses = [net(*pieces(held_out, part, length)) for part in places.split(64)]
    return float(torch.stack(losses).mean())
