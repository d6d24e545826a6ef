"""A lab: hosts, a switch between them, and links with a rate."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.lab import reaper
from gradwire.lab.namespaces import Namespace
from gradwire.lab.rates import format_rate, parse_rate
from gradwire.processes import wait_for_all

INTERFACE = "eth0"
MASTER_PORT = 29500
_MAX_HOSTS = 4096
# A token bucket of 4 ms holds 96 % of the rate and more; no smaller than a TCP segment before it is cut.
_BURST_S = 0.004
_MIN_BURST_BYTES = 1 << 16
# How long a packet may queue before it is dropped.
_QUEUE_S = 0.1
# Once one host's command has failed, the others get this long to end by themselves.
_GRACE_S = 5.0


class LabUnavailable(RuntimeError):
    """This machine or user cannot make network namespaces; the text says what to install or grant."""


class Lab:
    """Hosts in network namespaces, joined by a switch; each host's link has a rate in either direction.

    Args:
        hosts: how many.
        rate: of every link, such as ``"1gbit"``; None for no limit.

    Raises ValueError for numbers that make no sense, and `LabUnavailable` without root or iproute2.

    What is made lives as long as the lab: at its end, or when this process dies in whatever way, the
    processes in it are killed and the kernel removes it. Nothing of it has a name outside, so labs can
    run side by side.

    Example::

        with Lab(hosts=2, rate="100mbit") as lab:
            code = lab.run(["python", "train.py"])
    """

    def __init__(self, hosts: int = 2, rate: str | None = None) -> None:
        if not 1 <= hosts <= _MAX_HOSTS:
            raise ValueError(f"a lab has 1 to {_MAX_HOSTS} hosts, not {hosts}")
        self.num_hosts = hosts
        self.bits_per_s = None if rate is None else parse_rate(rate)
        ip = _find_tools()
        self._namespaces: list[Namespace] = []
        self._reaper: subprocess.Popen[bytes] | None = None
        try:
            self._namespaces = _make_namespaces(hosts + 1)
            self._reaper = self._start_reaper()
            self._connect(ip)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        """The IP address of a host."""
        self._check(host)
        return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"

    def path(self, host: int) -> str:
        """Where processes of this user find the host's namespace."""
        return self._hosts[host].path

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Move the calling thread onto a host: its sockets and the processes it starts are there."""
        self._check(host)
        with self._hosts[host].inside():
            yield

    def environment(self, host: int) -> dict[str, str]:
        """What torchrun would set there, for one rank on each host."""
        self._check(host)
        here, size = str(host), str(self.num_hosts)
        return {
            "RANK": here,
            "WORLD_SIZE": size,
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": here,
            "GROUP_WORLD_SIZE": size,
            "ROLE_RANK": here,
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            # Else NCCL sees that hosts share a machine, and goes around their links.
            "NCCL_HOSTID": f"gradwire-lab-{host}",
            # As torchrun does, for hosts that share this machine's cores.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # torch warns at each connection of hosts that have no name server.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }

    def start(
        self, command: Sequence[str], host: int, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on one host. ``options`` go to ``subprocess.Popen``; OSError if there is none."""
        environment = {**os.environ, **self.environment(host), **(env or {})}
        with self.inside(host):
            return subprocess.Popen(command, env=environment, **options)

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> int:
        """Run a command on every host, as one rank each, and wait for all.

        Returns 0 if all did, else the exit code of the first that failed (128 and the number of the
        signal that killed it); the others are then ended. Raises OSError if the command cannot be started
        and ``subprocess.TimeoutExpired`` after ``timeout`` seconds, with all of them ended.
        """
        processes: list[subprocess.Popen[Any]] = []
        try:
            # Those started so far are in the list if one cannot be.
            processes.extend(self.start(command, host, env=env) for host in range(self.num_hosts))
            failed = wait_for_all(processes, timeout)
        finally:
            _end_all(processes)
        if failed is None:
            return 0
        _, code = failed
        return code if code > 0 else 128 - code

    def bytes_sent(self, host: int) -> int:
        """Bytes that a host's interface has sent so far, headers and acknowledgements included."""
        with self.inside(host):
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        counters = next(line.partition(":")[2].split() for line in lines if f"{INTERFACE}:" in line)
        return int(counters[8])

    def close(self) -> None:
        """End every process in the lab, and the lab."""
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            self._reaper.wait()
            self._reaper = None
        for namespace in self._namespaces:
            namespace.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __str__(self) -> str:
        rate = "no limit" if self.bits_per_s is None else format_rate(self.bits_per_s)
        return f"{self.num_hosts} hosts, {rate}"

    @property
    def _hosts(self) -> list[Namespace]:
        return self._namespaces[1:]

    def _check(self, host: int) -> None:
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"there is no host {host}; they are 0 to {self.num_hosts - 1}")

    def _start_reaper(self) -> subprocess.Popen[bytes]:
        files = [namespace.file for namespace in self._namespaces]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, *map(str, files)],
            stdin=subprocess.PIPE,
            pass_fds=files,
            start_new_session=True,  # a Ctrl-C is for the commands
        )

    def _connect(self, ip: str) -> None:
        switch = self._namespaces[0]
        links = ["link add switch type bridge", "link set switch up"]
        for host, namespace in enumerate(self._hosts):
            links += [
                f"link add port{host} type veth peer name {INTERFACE} netns {namespace.path}",
                f"link set port{host} master switch up",
            ]
        _batch(ip, links, switch)
        for host, namespace in enumerate(self._hosts):
            address = [f"address add {self.address(host)}/16 dev {INTERFACE}"]
            _batch(ip, [*address, f"link set {INTERFACE} up", "link set lo up"], namespace)
        if self.bits_per_s is not None:
            burst = max(_MIN_BURST_BYTES, int(_BURST_S * self.bits_per_s / 8))
            shape = f"root tbf rate {self.bits_per_s:.0f}bit burst {burst} latency {_QUEUE_S * 1e3:.0f}ms"
            tc = str(Path(ip).with_name("tc"))
            _batch(tc, [f"qdisc add dev port{i} {shape}" for i in range(self.num_hosts)], switch)
            for namespace in self._hosts:
                _batch(tc, [f"qdisc add dev {INTERFACE} {shape}"], namespace)


def _find_tools() -> str:
    """Where ``ip`` is, with ``tc`` beside it."""
    if not sys.platform.startswith("linux"):
        raise LabUnavailable("the lab is made of Linux network namespaces; this is not Linux")
    # Users other than root often have no sbin in their path.
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    ip = shutil.which("ip", path=path)
    if ip is None or not Path(ip).with_name("tc").exists():
        raise LabUnavailable("the lab needs the commands ip and tc: apt install iproute2")
    return ip


def _make_namespaces(count: int) -> list[Namespace]:
    made: list[Namespace] = []
    try:
        made.extend(Namespace() for _ in range(count))
    except OSError as error:
        for namespace in made:
            namespace.close()
        raise LabUnavailable(
            f"the lab needs the right to make network namespaces ({error.strerror}): run it as root; in a "
            "container, with --cap-add SYS_ADMIN --cap-add NET_ADMIN; or, where user namespaces are "
            "allowed, under `unshare --map-root-user --net`"
        ) from None
    return made


def _batch(tool: str, lines: list[str], namespace: Namespace) -> None:
    with namespace.inside():
        done = subprocess.run(
            [tool, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise LabUnavailable(f"{Path(tool).name} could not set up the lab: {done.stderr.strip()}")


def _end_all(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Let what still runs finish its last words, then end it."""
    deadline = time.monotonic() + _GRACE_S
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in running:
        process.kill()
        process.wait()
