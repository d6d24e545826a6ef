"""``gradwire lab``: run a command on every host of a slow network."""

from __future__ import annotations

from typing import Annotated

import typer

from gradwire.cli.ending import FAILED, INTERRUPTED, WRONG_ARGUMENTS, stop
from gradwire.lab import Lab, LabUnavailable

_NOT_FOUND = 127


def lab(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command for each host.")],
    hosts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Hosts on this machine, one rank on each.")
    ] = 2,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            metavar="RATE",
            help="Rate of each host's link, such as 100mbit or 1gbit. Default: no limit.",
            show_default=False,
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(
            "--delay",
            metavar="TIME",
            help="Time from host to host, such as 500us or 20ms; an answer takes as long again. "
            "Default: none.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """See how a training behaves on a slow network: several hosts on this machine, joined by slow links.

    Each host is a network namespace with an interface eth0. It runs the command
    as one rank, in the environment that torchrun would give it. Needs root and
    Debian's iproute2. However the lab ends, it leaves nothing behind.

    Example, with the link of most offices:

        gradwire lab --hosts 2 --rate 1gbit -- python train.py

    And with two sites 20 milliseconds apart:

        gradwire lab --hosts 2 --rate 100mbit --delay 20ms -- python train.py

    Exit codes: 0 if all ranks ended with 0, else that of the first rank that
    failed (128 plus the signal's number if a signal killed it); 127 no such
    command; 2 wrong arguments; 1 also if the lab cannot be made.
    """
    try:
        with Lab(hosts, rate, delay) as made:
            code = made.run(command)
    except ValueError as error:
        stop("lab", str(error), WRONG_ARGUMENTS)
    except LabUnavailable as error:
        stop("lab", str(error), FAILED)
    except OSError as error:
        stop("lab", f"cannot run {command[0]}: {error.strerror}", _NOT_FOUND)
    except KeyboardInterrupt:
        code = INTERRUPTED
    raise typer.Exit(code)
