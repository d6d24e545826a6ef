"""Train a language model with DiLoCo on workers whose members torchft decides: no process starts again.

Start torchft's lighthouse on one machine, and this on each, at any time:

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000
    TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/diloco_torchft.py

At the start of each period the workers that are there form a quorum. When one is lost, the others go on with
what they have done since the last average. One that is new takes the model from them. Needs torchft 0.2.
"""

import argparse
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.process_group import create_store_client

import gradwire
from lm import LM, corpus, pieces, starts
from train_lm import learning_rate

LENGTH, BATCH, PEAK = 64, 4, 3e-3
TIMEOUT = timedelta(seconds=60)


class Quorum(ProcessGroupGloo):
    """Makes a group for gradwire of each new quorum."""

    members = None

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any) -> None:
        super().configure(store_addr, replica_id, rank, world_size, *more)
        store = PrefixStore("gradwire", create_store_client(store_addr, timeout=TIMEOUT))
        self.members = gradwire.make_group(store, rank, world_size, TIMEOUT)


def main() -> None:
    """Train, and print the number of workers in each period."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--period", type=int, default=20)
    options = parser.parse_args()

    quorum = Quorum()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=quorum,
        load_state_dict=None,  # gradwire brings those that are behind up to date
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"worker-{uuid.uuid4().hex[:8]}-0",
        timeout=TIMEOUT,
    )
    net = LM(width=96, layers=3, length=LENGTH)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    outer = gradwire.DiLoCo(lr=0.7, momentum=0.6, fragments=2, delay=2)
    local, members, is_over = None, None, False
    text, _ = corpus()

    def step(local: gradwire.LocalSGD) -> float:
        places = starts(text, (BATCH,), LENGTH, seed=torch.seed() % 2**31)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(local.num_steps, options.steps, PEAK)
        optimizer.zero_grad()
        loss = net(*pieces(text, places, LENGTH))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        local.step()
        return float(loss)

    def join(local: gradwire.LocalSGD | None, now: dist.ProcessGroup) -> gradwire.LocalSGD:
        nonlocal members
        try:
            if local is None:
                local = gradwire.LocalSGD(
                    net, optimizer, period=options.period, recipe="int4", outer=outer, sites=now
                )
            elif now is not members:
                local.regroup(now)
        except RuntimeError as error:  # a worker is lost while they meet
            raise gradwire.WireError(str(error)) from error
        members = now
        return local

    while not is_over:
        manager.start_quorum(allow_heal=False)
        try:
            local = join(local, quorum.members)
            if local.num_steps < options.steps:
                loss = step(local)
                while local.num_steps % options.period:
                    loss = step(local)
                print(f"step {local.num_steps}, {quorum.members.size()} workers, loss {loss:.3f}", flush=True)
            if local.num_steps >= options.steps:
                local.average()  # all workers end with the same parameters
                is_over = True
        except gradwire.WireError as error:  # a worker is lost: go on with the next quorum
            print(error, flush=True)
            manager.report_error(error)
        manager.should_commit()
    local.detach()
    manager.shutdown()


if __name__ == "__main__":
    main()
