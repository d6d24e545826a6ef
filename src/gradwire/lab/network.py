"""Hosts, a switch between them, and links with a rate and a delay."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.lab import reaper, relay
from gradwire.lab.namespaces import Namespace
from gradwire.lab.taps import open_tap
from gradwire.links import format_delay, format_rate, parse_delay, parse_rate
from gradwire.processes import rank_environment, terminate_all, wait_for_all

INTERFACE = "eth0"
MASTER_PORT = 29500
_MAX_HOSTS = 4096
# With a token bucket of 4 ms, at least 96 % of the rate gets through. The bucket must hold a whole TCP
# segment before it is cut into packets: 64 KiB, and the headers of its 46 packets. Segments that do not fit
# are cut here, and each packet costs time of the cores that hosts share.
_BURST_S = 0.004
_MIN_BURST_BYTES = 80 << 10
# A packet that has queued for longer is dropped.
_QUEUE_S = 0.1
# Users other than root often do not have these in their PATH.
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
# Once a command has failed on one host, those on the others get this long to end.
_GRACE_S = 5.0


class LabUnavailable(RuntimeError):
    """Raised if this machine or user cannot make network namespaces; the text says what to do."""


class Lab:
    """Hosts in network namespaces, joined by a switch; the rate limits each link in both directions.

    Args:
        hosts: number of hosts.
        rate: rate of every link, such as ``"1gbit"``; None for no limit.
        delay: the time that a packet takes from one host to another, such as ``"20ms"``; an answer takes
            as long again. None for no delay.

    Raises ValueError for a wrong number of hosts, rate or delay, and `LabUnavailable` without root or
    iproute2.

    At the end of the lab, its processes are killed and the kernel removes it. The same happens if this
    process is killed. Nothing in a lab has a name outside it, so several labs can run side by side.

    Example::

        with Lab(hosts=2, rate="100mbit") as lab:
            code = lab.run(["python", "train.py"])
    """

    def __init__(self, hosts: int = 2, rate: str | None = None, delay: str | None = None) -> None:
        if not 1 <= hosts <= _MAX_HOSTS:
            raise ValueError(f"a lab has 1 to {_MAX_HOSTS} hosts, not {hosts}")
        self.num_hosts = hosts
        self.bits_per_s = None if rate is None else parse_rate(rate)
        self.delay_s = None if delay is None else parse_delay(delay)
        ip = find_tools()
        self._namespaces: list[Namespace] = []
        self._helpers: list[subprocess.Popen[bytes]] = []
        try:
            self._namespaces = _make_namespaces(hosts + 1)
            files = [namespace.file for namespace in self._namespaces]
            self._start_helper(reaper.__file__, [], files)
            self._connect(ip)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        """Return the IP address of a host."""
        self._check(host)
        return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"

    def path(self, host: int) -> str:
        """Return the path of the host's namespace, for processes of this user."""
        self._check(host)
        return self._hosts[host].path

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Move the calling thread onto a host, with the sockets and processes that it makes there."""
        self._check(host)
        with self._hosts[host].inside():
            yield

    def environment(self, host: int, local_rank: int = 0, ranks_per_host: int = 1) -> dict[str, str]:
        """Return the variables that torchrun would set for a rank on a host."""
        self._check(host)
        rank, size = host * ranks_per_host + local_rank, self.num_hosts * ranks_per_host
        return {
            **rank_environment(
                rank,
                size,
                local_rank=local_rank,
                local_world_size=ranks_per_host,
                address=self.address(0),
                port=MASTER_PORT,
            ),
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": str(self.num_hosts),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(size),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            # Otherwise NCCL sees that the hosts share a machine, and bypasses their links.
            "NCCL_HOSTID": f"gradwire-lab-{host}",
            # As torchrun does: the hosts share this machine's cores.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Without a name server, torch would warn at each connection.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }

    def start(
        self, command: Sequence[str], host: int, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on one host; ``options`` go to ``subprocess.Popen``.

        Raises OSError if the command cannot be started.
        """
        environment = {**os.environ, **self.environment(host), **(env or {})}
        with self.inside(host):
            return subprocess.Popen(command, env=environment, **options)

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> int:
        """Run a command as one rank on every host, and wait for all of them.

        Returns 0 if all ended with 0, else the exit code of the first that failed (128 plus the signal's
        number if a signal killed it). The first failure ends the other ranks. Raises OSError if the
        command cannot be started, and ``subprocess.TimeoutExpired`` after ``timeout`` seconds; then too,
        no rank is left.
        """
        processes: list[subprocess.Popen[Any]] = []
        try:
            # If one start fails, `extend` has kept the processes before it.
            processes.extend(self.start(command, host, env=env) for host in range(self.num_hosts))
            failure = wait_for_all(processes, timeout)
        finally:
            terminate_all(processes, _GRACE_S)
        return 0 if failure is None else failure.shell_code

    def set_rate(self, rate: str) -> None:
        """Change the rate of every link, also while commands run.

        Raises ValueError for a wrong rate, and for a lab that has ended.
        """
        bits_per_s = parse_rate(rate)
        self._limit(bits_per_s, Path(find_tools()).with_name("tc"))
        self.bits_per_s = bits_per_s

    def bytes_sent(self, host: int) -> int:
        """Return the bytes that a host's interface has sent, with headers and acknowledgements."""
        with self.inside(host):
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        counters = next(line.partition(":")[2].split() for line in lines if f"{INTERFACE}:" in line)
        return int(counters[8])

    def close(self) -> None:
        """Kill every process in the lab, and remove the lab."""
        while self._helpers:
            helper = self._helpers.pop(0)
            assert helper.stdin is not None
            helper.stdin.close()
            helper.wait()
        for namespace in self._namespaces:
            namespace.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __str__(self) -> str:
        rate = "no limit" if self.bits_per_s is None else format_rate(self.bits_per_s)
        delay = "" if self.delay_s is None else f", {format_delay(self.delay_s)} long"
        return f"{self.num_hosts} hosts, {rate}{delay}"

    @property
    def _hosts(self) -> list[Namespace]:
        return self._namespaces[1:]

    def _check(self, host: int) -> None:
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"there is no host {host}; the hosts are 0 to {self.num_hosts - 1}")

    def _start_helper(self, program: str, arguments: list[str], files: list[int]) -> None:
        """Start a program that ends with this process at the latest; it gets the numbers of open files."""
        helper = subprocess.Popen(
            [sys.executable, "-I", "-S", program, *arguments, *map(str, files)],
            stdin=subprocess.PIPE,
            pass_fds=files,
            start_new_session=True,  # a Ctrl-C must reach the commands only
        )
        self._helpers.append(helper)

    def _connect(self, ip: str) -> None:
        switch = self._namespaces[0]
        _batch(ip, ["link add switch type bridge", "link set switch up"], switch)
        if self.delay_s is None:
            paths = [namespace.path for namespace in self._hosts]
            pairs = [f"port{i} type veth peer name {INTERFACE} netns {path}" for i, path in enumerate(paths)]
            _batch(ip, [f"link add {pair}" for pair in pairs], switch)
        else:
            self._connect_by_relay(self.delay_s)
        _batch(ip, [f"link set port{i} master switch up" for i in range(self.num_hosts)], switch)
        for host, namespace in enumerate(self._hosts):
            address = [f"address add {self.address(host)}/16 dev {INTERFACE}"]
            _batch(ip, [*address, f"link set {INTERFACE} up", "link set lo up"], namespace)
        if self.bits_per_s is not None:
            self._limit(self.bits_per_s, Path(ip).with_name("tc"))

    def _limit(self, bits_per_s: float, tc: Path) -> None:
        burst = max(_MIN_BURST_BYTES, int(_BURST_S * bits_per_s / 8))
        shape = f"root tbf rate {bits_per_s:.0f}bit burst {burst} latency {_QUEUE_S * 1e3:.0f}ms"
        ports = [f"qdisc replace dev port{i} {shape}" for i in range(self.num_hosts)]
        _batch(str(tc), ports, self._namespaces[0])
        for namespace in self._hosts:
            _batch(str(tc), [f"qdisc replace dev {INTERFACE} {shape}"], namespace)

    def _connect_by_relay(self, delay_s: float) -> None:
        """Make both ends of every link, and start a program that passes frames between them."""
        files: list[int] = []
        try:
            for host, namespace in enumerate(self._hosts):
                for inside, name in ((namespace, INTERFACE), (self._namespaces[0], f"port{host}")):
                    with inside.inside():
                        files.append(open_tap(name))
            # A packet crosses two links: its sender's and its receiver's.
            self._start_helper(relay.__file__, [str(delay_s / 2)], files)
        except OSError as error:
            raise LabUnavailable(
                f"links with a delay need TAP devices, and /dev/net/tun says {error.strerror}: run as "
                "root; start a container with --device /dev/net/tun; or leave the delay out"
            ) from None
        finally:
            for file in files:
                os.close(file)


def find_tools() -> str:
    """Return the path of ``ip``, which has ``tc`` beside it; `LabUnavailable` if they are not installed."""
    if not sys.platform.startswith("linux"):
        raise LabUnavailable("the lab needs Linux, for its network namespaces")
    path = os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS])
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
            f"the lab may not make network namespaces ({error.strerror}): run it as root; start a container "
            "with --cap-add SYS_ADMIN --cap-add NET_ADMIN; where user namespaces are allowed, run it under "
            "`unshare --map-root-user --net`"
        ) from None
    return made


def _batch(tool: str, lines: list[str], namespace: Namespace) -> None:
    with namespace.inside():
        done = subprocess.run(
            [tool, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise LabUnavailable(f"{Path(tool).name} could not set up the lab: {done.stderr.strip()}")
