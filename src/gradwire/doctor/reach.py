"""Reachability: each rank opens a connection to each other rank, outside of any backend.

A backend that cannot connect waits for its whole timeout and names nobody. These connections fail in seconds,
and only the store has to be reached by all.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch

from gradwire.doctor.findings import Finding
from gradwire.doctor.machine import own_address
from gradwire.torch_private import PrefixStore
from gradwire.version import __version__

_CONNECT_S = 5.0
_PREFIX = "gradwire/doctor"


def examine_group(
    store: Any, rank: int, size: int, machine: Sequence[Finding] = (), timeout_s: float = 60.0
) -> list[Finding]:
    """Return who reaches whom, whether versions differ, and what each machine found; collective.

    Args:
        store: a store that all ranks reach, such as torchrun's.
        rank: the rank of this process.
        size: the number of ranks.
        machine: the findings about this rank's machine.
        timeout_s: the longest wait for other ranks.

    Every rank returns the same findings. Raises RuntimeError if a rank does not come.
    """
    store = PrefixStore(_PREFIX, store)
    store.set_timeout(timedelta(seconds=timeout_s))
    with _Listener() as listener:
        own = {
            "host": socket.gethostname(),
            "address": _advertised(),
            "port": listener.port,
            "versions": f"gradwire {__version__}, torch {torch.__version__}",
            "machine": [asdict(finding) for finding in machine],
        }
        store.set(f"rank/{rank}", json.dumps(own))
        everyone = [json.loads(_get(store, f"rank/{peer}", peer)) for peer in range(size)]
        failed = {
            peer: reason
            for peer, other in enumerate(everyone)
            if peer != rank and (reason := _try(other["address"], other["port"])) is not None
        }
        store.set(f"failed/{rank}", json.dumps(failed))
        found = [json.loads(_get(store, f"failed/{peer}", peer)) for peer in range(size)]
        # A listener must outlive the last attempt to reach it.
        store.set(f"done/{rank}", "")
        for peer in range(size):
            _get(store, f"done/{peer}", peer)
    return [*_merge(everyone), *_describe_versions(everyone), *_describe_reach(everyone, found)]


def _merge(everyone: list[dict[str, Any]]) -> list[Finding]:
    """Return the findings of all machines; those that not every machine has name their hosts."""
    hosts = {each["host"] for each in everyone}
    found: dict[Finding, dict[str, None]] = {}
    for each in everyone:
        for fields in each["machine"]:
            found.setdefault(Finding(**fields), {})[each["host"]] = None
    return [
        finding if len(own) == len(hosts) else replace(finding, text=f"{', '.join(own)}: {finding.text}")
        for finding, own in found.items()
    ]


def _get(store: Any, key: str, peer: int) -> bytes:
    try:
        value: bytes = store.get(key)
    except RuntimeError as error:
        raise RuntimeError(f"rank {peer} did not come: every rank must run `gradwire doctor`") from error
    return value


def _describe_versions(everyone: list[dict[str, Any]]) -> list[Finding]:
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(everyone):
        ranks.setdefault(each["versions"], []).append(rank)
    if len(ranks) == 1:
        return [Finding("ranks", "ok", f"all {len(everyone)} ranks have {next(iter(ranks))}")]
    text = "; ".join(f"{versions} on rank(s) {_list(own)}" for versions, own in ranks.items())
    return [Finding("ranks", "problem", f"versions differ: {text}", "install the same ones everywhere")]


def _describe_reach(everyone: list[dict[str, Any]], failed: list[dict[str, str]]) -> list[Finding]:
    size = len(everyone)
    hosts = len({each["host"] for each in everyone})
    if not any(failed):
        return [Finding("reach", "ok", f"every rank reaches every other: {size} ranks on {hosts} host(s)")]
    findings = []
    for rank, own in enumerate(failed):
        for reason in dict.fromkeys(own.values()):
            peers = [int(peer) for peer, why in own.items() if why == reason]
            where = ", ".join(f"{peer} ({everyone[peer]['address']})" for peer in peers)
            findings.append(
                Finding(
                    "reach",
                    "problem",
                    f"rank {rank} on {everyone[rank]['host']} cannot reach rank(s) {where}: {reason}",
                    "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the network that the "
                    "machines share, and let the firewall pass all ports between them",
                )
            )
    return findings


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _advertised() -> str:
    """Return the address at which Gloo would listen on this machine."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return (_address_of(interface) if interface else own_address()) or "127.0.0.1"


def _address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface, or None."""
    get_address = 0x8915  # SIOCGIFADDR of Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface[:15].encode())
        try:
            answer = fcntl.ioctl(probe.fileno(), get_address, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _try(address: str, port: int) -> str | None:
    """Connect to an address; return the reason if that fails."""
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
            connection.settimeout(_CONNECT_S)
            answer = connection.recv(16)
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if answer == b"gradwire" else "something else answers at that address"


class _Listener:
    """A port at which this rank answers until the block ends."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="gradwire-doctor", daemon=True)

    def __enter__(self) -> _Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing a socket does not wake a thread that waits in accept(); shutting it down does.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_CONNECT_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"gradwire")
