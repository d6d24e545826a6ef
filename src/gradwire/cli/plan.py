"""``gradwire plan``: predict step times on hardware that is not there."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, NoReturn

import typer
from torch import nn

from gradwire.cli.calibrations import load_calibration
from gradwire.cli.consoles import open_console, stdout_to_stderr
from gradwire.cli.ending import (
    FAILED,
    INTERRUPTED,
    WRONG_ARGUMENTS,
    clean_up_when_terminated,
    describe_failures,
    stop,
)
from gradwire.cli.options import takes_options
from gradwire.cli.plan_options import PlanOptions
from gradwire.cli.plan_tables import (
    OUTER_NOTE,
    SHARDED_NOTE,
    PlannedRow,
    comparison_json,
    comparison_table,
    first_call,
    outer_table,
    plan_json,
    plan_table,
)
from gradwire.headroom import ALLREDUCE, OuterPrediction, format_count
from gradwire.lab import LabUnavailable
from gradwire.links import format_rate
from gradwire.planner import (
    Calibration,
    Cluster,
    Costs,
    Prediction,
    predict,
    predict_outer,
    predict_sharded,
    shapes_of,
    validate,
)
from gradwire.ranks import RanksFailed

# Predictions that are farther off fail --validate.
_TOLERANCE = 0.15


@takes_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    r"""Predict step times, scaling efficiency and bytes of each recipe, for up to thousands of workers.

    Uses each recipe's own bytes and messages, the link, and kernel speeds that
    are measured on this machine first (a second or two for each recipe). Low
    rank depends on the shapes of matrices: --model uses your model's, sends its
    embeddings and output layers as attach would, and --parameters stands for a
    typical transformer without them.

    Examples: 350 M parameters with 400 ms of compute; your own model:

        gradwire plan --parameters 350e6 --compute-ms 400 --nodes 2,16,1024

        gradwire plan --model mymodels.gpt:make --compute-ms 85 --link 1gbit

    With --fragments or --period, predicts an outer loop instead, which averages
    parameters every few steps (gradwire.LocalSGD with DiLoCo): bytes in the mean
    and of a turn, the delay that hides a turn, and the shortest period for the
    link, which is planned unless you give one:

        gradwire plan --parameters 350e6 --compute-ms 400 --link 100mbit \
            --fragments 8

    With --sharding, predicts a model that fully_shard has sharded, with the
    all-gathers of its parameters:

        gradwire plan --parameters 7e9 --compute-ms 900 --sharding hsdp \
            --workers 8 --weights bf16

    Exit codes: 0 predicted; 1 the calibration failed, or --validate found a
    prediction that is more than 15 % off; 2 wrong arguments; 130 interrupted.
    """
    clean_up_when_terminated()
    try:
        if options.validate:
            _validate(options)
        with stdout_to_stderr(options.json):
            predicted = _predict(options)
    except (ValueError, TypeError, OSError) as error:
        stop("plan", str(error), WRONG_ARGUMENTS)
    except RanksFailed as error:
        stop("plan", f"the measurement failed {describe_failures(error)}", FAILED)
    except LabUnavailable as error:
        stop("plan", str(error), FAILED)
    except KeyboardInterrupt:
        stop("plan", "interrupted", INTERRUPTED)
    if options.json:
        typer.echo(plan_json(predicted.rows))
    elif options.is_outer_loop:
        console = open_console()
        console.print(outer_table(_title(options, predicted.num_parameters), predicted.rows, options.period))
        console.print(f"\n{OUTER_NOTE}", markup=False)
        console.print(first_call(predicted.rows), markup=False, soft_wrap=True)
    else:
        console = open_console()
        title = _title(options, predicted.num_parameters)
        console.print(plan_table(title, predicted.rows, is_sharded=options.sharding is not None))
        console.print(f"\nEfficiency: compute over step. Kernel speeds: {predicted.machine}.", markup=False)
        if options.sharding is not None:
            console.print(SHARDED_NOTE, markup=False)


class _Predicted(NamedTuple):
    """The predictions for a model."""

    rows: list[PlannedRow]
    num_parameters: int
    machine: str
    """Machine that the kernel speeds come from."""


def _predict(options: PlanOptions) -> _Predicted:
    """Predict each recipe on each cluster."""
    recipes = options.recipes()
    options.check()
    compute_s, subject, clusters = options.compute_s(), options.subject(), options.clusters()
    measured = [*recipes, *([] if options.weights is None else [options.weights])]
    names = recipes if options.is_outer_loop else [ALLREDUCE, *recipes]

    def predicted(speeds: Calibration, name: str, cluster: Cluster) -> Prediction | OuterPrediction:
        plan = options.sharded_plan(cluster)
        if plan is not None:
            return predict_sharded(name, subject, compute_s, cluster, speeds, plan)
        if not options.is_outer_loop:
            return predict(name, subject, compute_s, cluster, speeds, options.bucket_mb)
        return predict_outer(
            name,
            subject,
            compute_s,
            cluster,
            speeds,
            period=options.period,
            fragments=options.fragments or 1,
            # Without a period, the speeds decide which delays fit.
            delay=None if speeds is free and options.period is None else options.delay,
        )

    # What cannot be planned is refused before the machine is measured.
    free = Calibration("", "", dict.fromkeys([ALLREDUCE, *measured], Costs(0, 0, 0, 0, 0)), num_cores=1)
    for name, cluster in itertools.product(names, clusters):
        predicted(free, name, cluster)
    speeds = load_calibration(options.calibration, measured, open_console(stderr=True))
    rows = [PlannedRow(at, name, predicted(speeds, name, at)) for at in clusters for name in names]
    shapes = shapes_of(subject) if isinstance(subject, nn.Module) else subject
    return _Predicted(rows, sum(map(math.prod, shapes)), speeds.machine)


def _title(options: PlanOptions, num_parameters: int) -> str:
    title = (
        f"{format_count(num_parameters)} parameters, {options.compute_ms:g} ms of compute, links of "
        f"{format_rate(options.bits_per_s)}, {options.latency_us:g} us"
    )
    if options.sharding is not None:
        title += f", {options.sharding}"
    if options.fragments is not None:
        title += f", {options.fragments} fragments"
    if options.period is not None:
        title += f", averaged every {options.period} steps"
    return title if options.num_workers == 1 else f"{title}, {options.num_workers} workers on each node"


def _validate(options: PlanOptions) -> NoReturn:
    """Compare predictions with measurements, print them, and exit."""
    recipes = options.recipes()
    options.check()
    cases, errors = options.lab_cases(), open_console(stderr=True)
    speeds = load_calibration(options.calibration, recipes, errors)
    comparisons = validate(recipes, speeds, lambda case: errors.print(f"measuring {case} ..."), cases)
    if options.json:
        typer.echo(comparison_json(comparisons))
    else:
        open_console().print(comparison_table(comparisons))
    raise typer.Exit(FAILED if any(abs(c.error) > _TOLERANCE for c in comparisons) else 0)
