"""Kill one worker of examples/diloco_elastic.py and let another join, and compare its loss.

    python benchmarks/elastic.py            four hosts, links of 10 Mbit/s; needs root, takes minutes

Trains twice in the lab, with torchrun on each host: once undisturbed, and once with a worker that is killed
after a third of the steps, and one with an empty folder that joins after two thirds.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gradwire.lab import Lab

EXAMPLE = Path(__file__).parent.parent / "examples" / "diloco_elastic.py"
SOURCE = Path(__file__).parent.parent / "src"
PORT = 29400
# torchrun's own store outlives a restart, and a rank may find there the address of a peer that is dead.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


class Workers:
    """One torchrun on each host of a lab; the first has the rendezvous."""

    def __init__(self, lab: Lab, folder: Path, options: list[str]) -> None:
        self._lab, self._folder, self._options = lab, folder, options
        self._agents: dict[int, subprocess.Popen[str]] = {}

    def start(self, host: int, folder: str) -> None:
        """Start a worker that keeps its checkpoint in ``folder``."""
        address = f"{self._lab.address(0)}:{PORT}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"3:{self._lab.num_hosts}"]
        command += ["--nproc-per-node", "1", "--max-restarts", "20", "--monitor-interval", "0.2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", "diloco"]
        # Hosts of a lab have no names, by which torchrun could see which of them has the rendezvous.
        conf = f"is_host={int(host == 0)},last_call_timeout=10,join_timeout=120"
        command += ["--rdzv-conf", conf, "--local-addr", self._lab.address(host)]
        command += [str(EXAMPLE), "--folder", str(self._folder / folder), *self._options]
        path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        with (self._folder / f"{folder}.log").open("w") as log:
            self._agents[host] = self._lab.start(
                command,
                host,
                env={**ENVIRONMENT, "PYTHONPATH": path},
                stdout=subprocess.PIPE if host == 0 else log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def kill(self, host: int) -> None:
        """Kill a worker with its agent, as a power cut would."""
        agent = self._agents.pop(host)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in [agent.pid, *map(int, children)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def lines(self) -> Iterator[str]:
        """Yield what the worker on the first host prints, until its agent ends."""
        output = self._agents[0].stdout
        assert output is not None
        yield from (line.rstrip() for line in output)

    def wait(self) -> list[int]:
        """Return the exit codes of all agents, in the order of hosts."""
        return [agent.wait(timeout=120) for _, agent in sorted(self._agents.items())]


def train(
    lab: Lab, num_steps: int, at_step: Callable[[Workers, int], None], tell: Callable[[str], None]
) -> float:
    """Train to the end; call ``at_step`` after each average; return the held-out loss."""
    loss = float("nan")
    with tempfile.TemporaryDirectory() as name:
        workers = Workers(lab, Path(name), ["--steps", str(num_steps)])
        for host in range(lab.num_hosts):
            workers.start(host, f"worker{host}")
        for line in workers.lines():
            kind, _, figure = line.rpartition(" ")
            if kind == "step":
                at_step(workers, int(figure))
            else:
                tell(line)
                loss = float(figure) if kind == "held-out loss" else loss
        codes = workers.wait()
        if any(codes):
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(Path(name).glob("*.log")))
            raise RuntimeError(f"torchrun ended with {codes}\n{logs}")
    return loss


def disturb(num_steps: int, tell: Callable[[str], None]) -> Callable[[Workers, int], None]:
    """Return what kills the last worker after a third of the steps, and starts another after two thirds."""
    done: list[str] = []

    def at_step(workers: Workers, step: int) -> None:
        if not done and step >= num_steps // 3:
            workers.kill(3)
            done.append("killed")
            tell(f"step {step}: worker 3 is killed")
        elif len(done) == 1 and step >= 2 * num_steps // 3:
            workers.start(3, "worker4")
            done.append("joined")
            tell(f"step {step}: worker 4 joins, with nothing")

    return at_step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--link", default="10mbit", help="rate of each host's link")
    options = parser.parse_args()

    def tell(text: str) -> None:
        print(f"  {text}", flush=True)

    losses = {}
    for name in ("undisturbed", "disturbed"):
        print(f"{name}: 4 hosts, links of {options.link}, {options.steps} steps", flush=True)
        at_step = disturb(options.steps, tell) if name == "disturbed" else lambda workers, step: None
        with Lab(4, options.link) as lab:
            losses[name] = train(lab, options.steps, at_step, tell)
    gap = 100 * (losses["disturbed"] / losses["undisturbed"] - 1)
    print(f"held-out loss {losses['disturbed']:.4f}, undisturbed {losses['undisturbed']:.4f}: {gap:+.2f} %")


if __name__ == "__main__":
    main()
