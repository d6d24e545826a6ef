"""``gradwire headroom``: measure whether communication is the bottleneck."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from gradwire.cli.consoles import stdout_to_stderr
from gradwire.cli.ending import (
    FAILED,
    INTERRUPTED,
    WRONG_ARGUMENTS,
    clean_up_when_terminated,
    describe_failures,
    stop,
)
from gradwire.cli.headroom_options import HeadroomOptions
from gradwire.cli.options import takes_options
from gradwire.cli.outputs import RecordOutput
from gradwire.cli.progress import show_progress
from gradwire.headroom import (
    Benchmark,
    Record,
    ScriptFailed,
    measure_script,
    measure_steps,
    measure_under_torchrun,
)
from gradwire.lab import Lab, LabUnavailable
from gradwire.processes import under_torchrun
from gradwire.ranks import RanksFailed
from gradwire.scripts import Script


@takes_options(HeadroomOptions)
def headroom(options: HeadroomOptions) -> None:
    """Is communication my bottleneck? Measure it, on your model and your network.

    Trains with plain DDP, with each recipe and without any communication,
    compares the step times, and says what to use. It starts the ranks itself;
    under torchrun it uses torchrun's. Your own script runs once for each row of
    the table, and ends after --steps steps. It writes its checkpoints and logs
    in every run.

    Examples: a built-in model; your own model; one that is sharded; your own
    script; on slow links; on a cluster:

        gradwire headroom --html headroom.html

        gradwire headroom --model mymodels.gpt:make --ranks 4

        gradwire headroom --sharding hsdp --ranks 4 --link 100mbit

        gradwire headroom -- train.py --its-own options

        gradwire headroom --link 100mbit,1gbit --recipe bf16 --recipe int4

        torchrun --nproc-per-node 4 -m gradwire headroom -- train.py

    Exit codes: 0 measured; 1 the measurement failed, and the errors of the
    ranks are printed; 2 wrong arguments; 130 interrupted.
    """
    clean_up_when_terminated()
    try:
        _measure_and_show(options)
    except ValueError as error:
        stop("headroom", str(error), WRONG_ARGUMENTS)
    except RanksFailed as error:
        stop("headroom", f"the measurement failed {describe_failures(error)}", FAILED)
    except (ScriptFailed, LabUnavailable, OSError) as error:
        stop("headroom", f"the measurement failed: {error}", FAILED)
    except KeyboardInterrupt:
        stop("headroom", "interrupted; every rank is ended", INTERRUPTED)


def _measure_and_show(options: HeadroomOptions) -> None:
    """Measure with each link, and show and write the records on the rank that has them.

    If one fails or is interrupted, those before it are written all the same: they took minutes.
    """
    output = RecordOutput(options.json_file, options.html, options.quiet)
    output.check()
    options.check()
    records: list[Record] = []
    try:
        with stdout_to_stderr(output.json_to_stdout):
            subject = options.subject()
            for rate in options.rates():
                title = "measuring" if rate is None else f"measuring with links of {rate}"
                with show_progress(output.errors, title, quiet=options.quiet) as on_progress:
                    record = _measure(subject, options, rate, on_progress)
                if record is None:  # under torchrun, on a rank other than 0
                    return
                records.append(record)
                output.show(record)
    finally:
        if records:
            output.write(records)


def _measure(
    subject: Script | Benchmark,
    options: HeadroomOptions,
    rate: str | None,
    on_progress: Callable[[int, int], None],
) -> Record | None:
    """Measure once: with links of a rate, with long links, or over the network as it is."""
    num_ranks = options.num_ranks
    needs_lab = rate is not None or options.delay is not None
    with Lab(options.num_hosts, rate, options.delay) if needs_lab else nullcontext() as lab:
        if isinstance(subject, Script):
            return measure_script(
                subject,
                options.recipes,
                num_ranks,
                num_steps=options.num_steps,
                budget=options.budget,
                lab=lab,
                on_progress=on_progress,
            )
        if under_torchrun():
            return measure_under_torchrun(subject, on_progress=on_progress)
        return measure_steps(subject, num_ranks, lab=lab, on_progress=on_progress)
