"""``gradwire headroom``: whether communication is the bottleneck."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import gradwire
from gradwire.cli.ending import FAILED, WRONG_ARGUMENTS, stop
from gradwire.headroom import (
    ModelFactory,
    Record,
    ScriptFailed,
    Workload,
    give_verdict,
    measure_here,
    measure_script,
    measure_steps,
    step_table,
    write_records,
)
from gradwire.lab import Lab, LabUnavailable, format_rate, parse_rate
from gradwire.report import ReportUnavailable, check_plotly, render_page
from gradwire.scripts import Script
from gradwire.testing import RanksFailed

_DEFAULT_RECIPES = tuple(name for name in gradwire.RECIPES if name != "noop")
# On a 1 Gbit/s link 8 MB instead of DDP's 25 gained as much as a recipe.
_SMALL_BUCKET_MB = 8.0


def headroom(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SCRIPT ARGUMENTS]", help="Your own training script, unchanged."),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Processes on this machine, one thread each.")
    ] = 2,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,...",
            help="Rates of links to sweep over, such as 100mbit,1gbit, each rank on a host of a lab "
            "(`gradwire lab --help`).",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help=f"A recipe to measure, such as bf16 or fp16:reduction=sum; may be given several times. "
            f"Default: {', '.join(_DEFAULT_RECIPES)}.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Your own model: a function that returns the model, a batch (a tuple for several "
            "arguments, a dict for named ones) and a loss function of the model's output.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str, typer.Option(metavar="NAME", help="A built-in model: transformer or resnet.")
    ] = "transformer",
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Of the transformer, a multiple of 8 (512); channels of the resnet (256).",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Residual blocks.")] = 6,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences or images per rank.")] = 2,
    sequence: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens per sequence (64); side of an image (16).", show_default=False
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="cpu or cuda; ranks may share a GPU.")
    ] = "cpu",
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Timed steps per recipe. Default: what --seconds allow, 8 to 24; of a script 16.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long to measure, about.")] = 40.0,
    bucket_mb: Annotated[
        float | None,
        typer.Option(
            metavar="MB",
            help="DDP's bucket_cap_mb. Default: DDP's own, and 8 MB too for plain DDP and the best recipe.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the record, too; '-' is stdout, the rest goes to stderr."),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a page with charts, too; needs gradwire[report]."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The verdict only.")] = False,
) -> None:
    """Is communication my bottleneck? Measure it, on your model and your network.

    Trains with plain DDP, with each recipe and without any communication, and
    compares the step times. A built-in model or --model takes turns with them; a
    script of yours is run once for each, and ended after so many steps: what it
    does on the way (checkpoints, logs) it does each time. Alone it starts the
    ranks itself; under torchrun it uses those.

    Examples, of two hosts on slow links and of a script on a cluster:

        gradwire headroom --link 100mbit,1gbit --html headroom.html

        torchrun --nproc-per-node 4 -m gradwire headroom -- train.py --its-own options

    Exit codes: 0 it was measured; 2 wrong arguments;
    1 the measurement failed, and the errors of the ranks are printed.
    """
    errors = Console(stderr=True, highlight=False)
    shown = errors if json == "-" else Console(highlight=False)
    try:
        _check_writable("--json", json)
        _check_page(html)
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"--bucket-mb must be above 0, not {bucket_mb:g}")
        if script and (model or bucket_mb):
            raise ValueError("a script makes its own models and buckets: leave --model and --bucket-mb out")
        chosen = [gradwire.recipe(spec) for spec in recipe or _DEFAULT_RECIPES]
        subject = _subject(script, model, workload, width, layers, batch, sequence)
        rates = _rates(link)
        how = _How(chosen, ranks, subject, steps, seconds, bucket_mb, device)
        records = []
        for rate in rates:
            with _progress(errors, quiet, rate) as on_progress:
                record = how.measure(rate, on_progress)
            if record is None:  # another rank than 0 under torchrun
                return
            records.append(record)
            if not quiet:
                shown.print(step_table(record), "")
            shown.print(give_verdict(record), markup=False)
    except (ValueError, ReportUnavailable) as error:
        stop("headroom", str(error), WRONG_ARGUMENTS)
    except (RanksFailed, ScriptFailed, LabUnavailable) as error:
        stop("headroom", f"the measurement failed: {error}", FAILED)
    _write(records, json, html)


def _write(records: list[Record], json: str | None, html: str | None) -> None:
    if json == "-":
        typer.echo(write_records(records), nl=False)
    for option, path, content in (
        ("--json", None if json == "-" else json, write_records),
        ("--html", html, render_page),
    ):
        if path is not None:
            try:
                Path(path).write_text(content(records))
            except OSError as error:
                stop("headroom", f"{option}: {error}", FAILED)


def _subject(
    script: list[str] | None,
    model: str | None,
    workload: str,
    width: int | None,
    layers: int,
    batch: int,
    sequence: int | None,
) -> Script | ModelFactory | Workload:
    """What is measured."""
    if script:
        return Script.of(script, is_module=False)
    if model is not None:
        return ModelFactory(model)
    is_resnet = workload == "resnet"
    return Workload(
        workload, width or (256 if is_resnet else 512), layers, batch, sequence or (16 if is_resnet else 64)
    )


@dataclass(frozen=True)
class _How:
    """The options that decide what is run."""

    recipes: list[gradwire.Recipe]
    ranks: int
    subject: Script | ModelFactory | Workload
    steps: int | None
    seconds: float
    bucket_mb: float | None
    device: str

    def measure(self, rate: str | None, on_progress: Callable[[int, int], None]) -> Record | None:
        with nullcontext() if rate is None else Lab(self.ranks, rate) as lab:
            if isinstance(self.subject, Script):
                return measure_script(
                    self.subject,
                    self.recipes,
                    self.ranks,
                    num_steps=self.steps,
                    lab=lab,
                    on_progress=on_progress,
                )
            options: dict[str, Any] = {
                "num_steps": self.steps,
                "seconds": self.seconds,
                "bucket_mb": self.bucket_mb,
                "small_bucket_mb": _SMALL_BUCKET_MB if self.bucket_mb is None else None,
                "on_progress": on_progress,
            }
            if not _under_torchrun():
                return measure_steps(
                    self.recipes, self.ranks, self.subject, device=self.device, lab=lab, **options
                )
            device = "cuda" if torch.cuda.is_available() else self.device
            if device == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
            try:
                return measure_here(self.recipes, self.subject, device=device, **options)
            finally:
                dist.destroy_process_group()


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _rates(link: str | None) -> list[str | None]:
    """The links to sweep over; None is the network as it is."""
    if link is None:
        return [None]
    if _under_torchrun():
        raise ValueError("--link makes hosts on this machine; leave torchrun out, or --link")
    return [format_rate(parse_rate(rate)) for rate in link.split(",")]


def _check_page(html: str | None) -> None:
    _check_writable("--html", html)
    if html is not None:
        check_plotly()


def _check_writable(option: str, name: str | None) -> None:
    """Raise ValueError now if a measurement could not be written later."""
    if name is None or name == "-":
        return
    path = Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: cannot write {name}")


@contextmanager
def _progress(console: Console, quiet: bool, rate: str | None) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, or a line of text if nobody watches."""
    what = "measuring" if rate is None else f"measuring with links of {rate}"
    if quiet or os.environ.get("RANK", "0") != "0":
        yield lambda *_: None
        return
    if not console.is_terminal:
        console.print(f"{what} ...")
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # Drawn only when a rank reports: a timer would take time from the ranks that it shares cores with.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting ranks", total=None)
        progress.refresh()
        yield lambda num_done, num_steps: progress.update(
            task, description=what, completed=num_done, total=num_steps, refresh=True
        )
