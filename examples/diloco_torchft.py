"""Train a language model with DiLoCo on workers whose members torchft decides: no process starts again.

Start torchft's lighthouse on one machine, and this on each, at any time:

    torchft_lighthouse --min_replicas 1
    TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/diloco_torchft.py

At the start of each period the workers that are there form a quorum. When one is lost, the others go on with
what they have done since the last average. One that is new takes the model from them. All end with the same
parameters. Runs with torch 2.13.0 and torchft 0.2.0 or its nightly build of 2026-10-26.
"""

import argparse
import socket
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torchft import Manager, ProcessGroupGloo

import gradwire
from lm import LM, corpus, pieces, starts
from train_lm import learning_rate

LENGTH, BATCH, PEAK = 64, 4, 3e-3
NUM_HELD_OUT = 256
TIMEOUT = timedelta(seconds=60)


class Quorum(ProcessGroupGloo):
    """Makes a group for gradwire of each new quorum."""

    members: dist.ProcessGroup | None = None

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        group = super()._create_pg(store, rank, world_size)
        self.members = gradwire.make_group(PrefixStore("gradwire", store), rank, world_size, TIMEOUT)
        return group


def main() -> None:
    """Train under torchft's manager."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--period", type=int, default=20)
    parser.add_argument(
        "--host", default=socket.gethostname(), help="the name or address by which others reach this machine"
    )
    options = parser.parse_args()

    quorum = Quorum()
    store = TCPStore(options.host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=quorum,
        load_state_dict=None,  # gradwire brings those that are behind up to date
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr=options.host,
        store_port=store.port,
        hostname=options.host,
        replica_id=f"worker-{uuid.uuid4().hex[:8]}-0",
        timeout=TIMEOUT,
        quorum_timeout=timedelta(hours=1),  # one that is new waits for the others to end their period
    )
    try:
        train(manager, quorum, options.steps, options.period)
    finally:
        manager.shutdown()


def train(manager: Manager, quorum: Quorum, num_steps: int, period: int) -> None:
    """Train; print the number of workers in each period, and in the end the loss on text held out."""
    net = LM(width=96, layers=3, length=LENGTH)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    outer = gradwire.DiLoCo(lr=0.7, momentum=0.6, fragments=2, delay=2)
    local, members, is_over = None, None, False
    text, held_out = corpus()

    def step(local: gradwire.LocalSGD) -> float:
        places = starts(text, (BATCH,), LENGTH, seed=torch.seed() % 2**31)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(local.num_steps, num_steps, PEAK)
        optimizer.zero_grad()
        loss = net(*pieces(text, places, LENGTH))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        local.step()
        return loss.item()

    def join(local: gradwire.LocalSGD | None) -> gradwire.LocalSGD:
        nonlocal members
        try:
            if local is None:
                local = gradwire.LocalSGD(
                    net, optimizer, period=period, recipe="int4", outer=outer, sites=quorum.members
                )
            elif quorum.members is not members:
                local.regroup(quorum.members)
        except RuntimeError as error:  # a worker is lost while they meet
            raise gradwire.WireError(str(error)) from error
        members = quorum.members
        return local

    while True:
        manager.start_quorum(allow_heal=False)
        try:
            if manager.errored():
                raise gradwire.WireError("a worker is lost while they meet")
            if is_over and quorum.members is members:  # nobody is lost or new since the final average
                break
            local = join(local)
            if local.num_steps < num_steps:
                loss = step(local)
                while local.num_steps % period:
                    loss = step(local)
                print(f"step {local.num_steps}, {members.size()} workers, loss {loss:.3f}", flush=True)
            if local.num_steps >= num_steps:
                local.average()  # all workers end with the same parameters
                is_over = True
        except FloatingPointError:  # this worker diverges: the others go on without it
            raise
        except gradwire.WireError as error:  # a worker is lost: go on with the next quorum
            print(error, flush=True)
            manager.report_error(error)
        manager.should_commit()
    local.detach()
    print(f"held-out loss {evaluate(net, held_out):.4f}", flush=True)


@torch.no_grad()
def evaluate(net: LM, held_out: torch.Tensor) -> float:
    """Return the mean loss on pieces of the text held out."""
    places = starts(held_out, (NUM_HELD_OUT,), LENGTH, seed=0)
    losses = [net(*pieces(held_out, part, LENGTH)) for part in places.split(64)]
    return float(torch.stack(losses).mean())


if __name__ == "__main__":
    main()
