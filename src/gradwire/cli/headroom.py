"""``gradwire headroom``: whether communication is the bottleneck."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from gradwire.cli.consoles import open_console
from gradwire.cli.ending import (
    FAILED,
    INTERRUPTED,
    WRONG_ARGUMENTS,
    clean_up_when_terminated,
    stop,
    why_ranks_failed,
)
from gradwire.cli.options import ALL_RECIPES, Html, Model, Recipes, check_positive, check_writable
from gradwire.cli.progress import show_progress
from gradwire.headroom import (
    Contest,
    ModelFactory,
    Record,
    ScriptFailed,
    Workload,
    give_verdict,
    local_gpu,
    measure_here,
    measure_script,
    measure_steps,
    step_table,
    write_records,
)
from gradwire.lab import Lab, LabUnavailable, format_rate, parse_rate
from gradwire.ranks import RanksFailed
from gradwire.report import ReportUnavailable, check_plotly, render_page
from gradwire.scripts import Script

# On a 1 Gbit/s link 8 MB instead of DDP's 25 gained as much as a recipe.
_SMALL_BUCKET_MB = 8.0


def headroom(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGUMENTS]", help="Your own training script, unchanged; or -m MODULE."
        ),
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
    recipe: Recipes = None,
    model: Model = None,
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
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cpu or cuda; ranks may share a GPU. Default: cpu; under torchrun cuda, if there is one.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Timed steps per recipe; of less than 7 chance cannot be ruled out. Default: what --seconds "
            "allow, 8 to 24; of a script 16.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="How long to time steps, about; of a script it is --steps.")
    ] = 30.0,
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
    html: Html = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The verdict only.")] = False,
) -> None:
    """Is communication my bottleneck? Measure it, on your model and your network.

    Trains with plain DDP, with each recipe and without any communication,
    compares the step times, and says what to use. It starts the ranks itself;
    under torchrun it uses those. A script of yours is run once for each row of
    the table, and ended after --steps steps: what it does on the way
    (checkpoints, logs) it does each time.

    Examples: a built-in model, your own model, your own script, on slow links,
    on a cluster:

        gradwire headroom --html headroom.html

        gradwire headroom --model mymodels.gpt:make --ranks 4

        gradwire headroom -- train.py --its-own options

        gradwire headroom --link 100mbit,1gbit --recipe bf16 --recipe int4

        torchrun --nproc-per-node 4 -m gradwire headroom -- train.py

    Exit codes: 0 it was measured; 2 wrong arguments; 130 interrupted;
    1 the measurement failed, and the errors of the ranks are printed.
    """
    clean_up_when_terminated()
    outputs = _Outputs(json, html, quiet)
    try:
        outputs.check()
        _check_launcher()
        check_positive("--seconds", seconds)
        check_positive("--bucket-mb", bucket_mb)
        subject: Script | Contest
        if script:
            if model or bucket_mb or device:
                raise ValueError(
                    "a script makes its own models, on its own devices: leave --model, --bucket-mb and "
                    "--device out"
                )
            subject = Script.of(script, is_module=False)
        else:
            small_mb = _SMALL_BUCKET_MB if bucket_mb is None else None
            trained = _workload(model, workload, width, layers, batch, sequence)
            chosen = recipe or ALL_RECIPES
            subject = Contest(chosen, trained, steps, seconds, bucket_mb, small_mb, device or _usual_device())
        records = []
        for rate in _rates(link):
            what = "measuring" if rate is None else f"measuring with links of {rate}"
            with show_progress(outputs.errors, what, quiet=quiet) as on_progress:
                record = _measure(subject, recipe or ALL_RECIPES, ranks, steps, rate, on_progress)
            if record is None:  # another rank than 0 under torchrun
                return
            records.append(record)
            outputs.show(record)
        outputs.write(records)
    except (ValueError, ReportUnavailable) as error:
        stop("headroom", str(error), WRONG_ARGUMENTS)
    except RanksFailed as error:
        stop("headroom", f"the measurement failed {why_ranks_failed(error)}", FAILED)
    except (ScriptFailed, LabUnavailable, OSError) as error:
        stop("headroom", f"the measurement failed: {error}", FAILED)
    except KeyboardInterrupt:
        stop("headroom", "interrupted; every rank is ended", INTERRUPTED)


class _Outputs:
    """Where records go: tables and verdicts to the terminal, the rest to files."""

    def __init__(self, json: str | None, html: Path | None, quiet: bool) -> None:
        self.errors = open_console(stderr=True)
        self._json_to_stdout = json == "-"
        self._shown = self.errors if self._json_to_stdout else open_console()
        self._json = None if json is None or self._json_to_stdout else Path(json)
        self._html = html
        self._quiet = quiet

    def check(self) -> None:
        """Raise now if something could not be written later."""
        check_writable("--json", self._json)
        check_writable("--html", self._html)
        if self._html is not None:
            check_plotly()

    def show(self, record: Record) -> None:
        if not self._quiet:
            self._shown.print(step_table(record), "")
        self._shown.print(give_verdict(record), markup=False)

    def write(self, records: list[Record]) -> None:
        if self._json_to_stdout:
            typer.echo(write_records(records), nl=False)
        for path, content in ((self._json, write_records), (self._html, render_page)):
            if path is not None:
                path.write_text(content(records))
                if not self._quiet:
                    self.errors.print(f"written: {path}", markup=False)


def _workload(
    model: str | None, name: str, width: int | None, layers: int, batch: int, sequence: int | None
) -> ModelFactory | Workload:
    if model is not None:
        return ModelFactory(model)
    is_resnet = name == "resnet"
    return Workload(
        name, width or (256 if is_resnet else 512), layers, batch, sequence or (16 if is_resnet else 64)
    )


def _measure(
    subject: Script | Contest,
    recipes: Sequence[str],
    ranks: int,
    steps: int | None,
    rate: str | None,
    on_progress: Callable[[int, int], None],
) -> Record | None:
    with nullcontext() if rate is None else Lab(ranks, rate) as lab:
        if isinstance(subject, Script):
            return measure_script(subject, recipes, ranks, num_steps=steps, lab=lab, on_progress=on_progress)
        if not _under_torchrun():
            return measure_steps(subject, ranks, lab=lab, on_progress=on_progress)
        _join_torchrun(subject.device)
        try:
            return measure_here(subject, on_progress=on_progress)
        finally:
            dist.destroy_process_group()


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _check_launcher() -> None:
    """Raise ValueError for a rank whose peers each would measure alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and not _under_torchrun():
        raise ValueError(
            f"this process is one of {size} ranks already (WORLD_SIZE), and not by torchrun: start it with "
            "torchrun, or by itself; for slow links, with --link instead of in `gradwire lab`"
        )


def _usual_device() -> str:
    return "cuda" if _under_torchrun() and torch.cuda.is_available() else "cpu"


def _join_torchrun(device: str) -> None:
    """Make the default group of the ranks that torchrun has started."""
    if device == "cpu":
        dist.init_process_group("gloo")
        return
    where = local_gpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.cuda.set_device(where)
    dist.init_process_group("nccl", device_id=where)


def _rates(link: str | None) -> list[str | None]:
    """The links to sweep over; None is the network as it is."""
    if link is None:
        return [None]
    if _under_torchrun():
        raise ValueError("--link makes hosts on this machine; leave torchrun out, or --link")
    return [format_rate(parse_rate(rate)) for rate in link.split(",")]
