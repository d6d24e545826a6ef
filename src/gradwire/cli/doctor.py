"""``gradwire doctor``: look for what would go wrong on this machine, and between ranks."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from rich.text import Text
from torch.distributed.rendezvous import rendezvous

from gradwire.cli.consoles import open_console, stdout_to_stderr
from gradwire.cli.ending import FAILED, WRONG_ARGUMENTS, run_until_interrupted, stop
from gradwire.cli.options import check_writable
from gradwire.doctor import Finding, Link, compare_links, examine_group, examine_machine, measure_links
from gradwire.processes import under_torchrun
from gradwire.torch_private import PrefixStore

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
_PATIENCE_S = 120.0


def doctor(
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Also write the findings as JSON; - is stdout.", show_default=False
        ),
    ] = None,
) -> None:
    r"""Look for what would go wrong: on this machine and, under torchrun, between ranks.

    Looks at versions, GPUs, network interfaces, the cache of compiled kernels,
    tools and limits. Under torchrun it also finds out who reaches whom, and
    measures latency and bandwidth between pairs of ranks.

    Examples: this machine; the network of two machines, run on both:

        gradwire doctor

        torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
            -m gradwire doctor

    Exit codes: 0 no problem found; 1 a problem was found; 2 wrong arguments;
    130 interrupted.
    """
    path = None if json_file in (None, "-") else Path(str(json_file))
    try:
        check_writable("--json", path)
    except ValueError as error:
        stop("doctor", str(error), WRONG_ARGUMENTS)
    links: list[Link] = []
    with stdout_to_stderr(json_file == "-"):
        findings = examine_machine()
        if under_torchrun():
            try:
                findings, links = run_until_interrupted("doctor", functools.partial(_examine_ranks, findings))
            except RuntimeError as error:
                stop("doctor", f"the group could not be examined: {error}", FAILED)
    if os.environ.get("RANK", "0") != "0":
        return
    _show(findings, links, to_stderr=json_file == "-")
    text = json.dumps(
        {"findings": [asdict(finding) for finding in findings], "links": [asdict(link) for link in links]},
        indent=2,
    )
    if json_file == "-":
        typer.echo(text)
    elif path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(FAILED)


def _examine_ranks(machine: list[Finding]) -> tuple[list[Finding], list[Link]]:
    """Return the findings of all ranks, and the links if all ranks reach each other."""
    patience = timedelta(seconds=_PATIENCE_S)
    store, rank, size = next(rendezvous("env://", timeout=patience))
    # torchrun keeps one store over restarts.
    store = PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    findings = examine_group(store, rank, size, machine, _PATIENCE_S)
    if any(finding.topic == "reach" and finding.level == "problem" for finding in findings):
        return findings, []
    has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if has_gpu else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=patience
    )
    try:
        links = measure_links(device)
    finally:
        dist.destroy_process_group()
    return [*findings, *compare_links(links)], links


def _show(findings: Sequence[Finding], links: Sequence[Link], *, to_stderr: bool) -> None:
    console = open_console(stderr=to_stderr)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(finding.topic, Text(finding.level, style=_STYLES[finding.level]), Text(finding.text))
        if finding.advice:
            table.add_row("", "", Text(f"-> {finding.advice}", style="dim"))
    console.print(table)
    if len(links) > 1:
        console.print("\nbetween ranks:")
        for link in links:
            console.print(f"  {link}", markup=False)
    problems = sum(finding.level == "problem" for finding in findings)
    console.print("\n" + ("no problem found" if not problems else f"{problems} problem(s) found"))
