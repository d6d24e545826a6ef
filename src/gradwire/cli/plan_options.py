"""The options of ``gradwire plan``, and the recipes, models and clusters that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

import gradwire
from gradwire.cli.options import Model, Recipes, ShardingKind, check_positive, check_writable, recipes_for
from gradwire.headroom import Machine, ModelFactory, Sharding
from gradwire.links import parse_rate
from gradwire.planner import (
    LAB_CASES,
    MAX_HOSTS_PER_CORE,
    Cluster,
    LabCase,
    Shape,
    ShardedPlan,
    can_be_planned,
    shapes_of,
    typical_shapes,
)

# Above every model there is, and still counted in seconds.
_MAX_PARAMETERS = 1e13
_NODES = "2,8,64,512"
_LINK = "10gbit"


@dataclass(frozen=True)
class PlanOptions:
    """The options as the user gave them."""

    num_parameters: Annotated[
        float | None,
        typer.Option(
            "--parameters",
            metavar="N",
            help="Number of parameters, such as 19e6; stands for a transformer of that size.",
            show_default=False,
        ),
    ] = None
    model: Model = None
    compute_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Time of a step without communication: the row noop of `gradwire headroom`.",
            show_default=False,
        ),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Numbers of nodes.",
            show_default=f"{_NODES}; --validate: those of 2,3,4,8,16 for which there are cores",
        ),
    ] = None
    num_workers: Annotated[
        int, typer.Option("--workers", min=1, metavar="N", help="Workers on each node; they share its link.")
    ] = 1
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Rate of each node's link.",
            show_default=f"{_LINK}; --validate: 100mbit to 1gbit",
        ),
    ] = None
    latency_us: Annotated[
        float, typer.Option(min=0, metavar="US", help="Latency between nodes, one way.")
    ] = 50.0
    bucket_mb: Annotated[
        float | None, typer.Option(metavar="MB", help="DDP's bucket_cap_mb.", show_default="25")
    ] = None
    sharding: ShardingKind = None
    num_shards: Annotated[
        int | None,
        typer.Option(
            "--shards",
            min=1,
            metavar="N",
            help="With --sharding hsdp: the ranks of a replica.",
            show_default="those of a node",
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="With --sharding: the encoding of gathered parameters, as for attach; fp32 is exact.",
            show_default="torch gathers them",
        ),
    ] = None
    reshards: Annotated[
        bool,
        typer.Option(
            "--reshard/--no-reshard", help="With --sharding: blocks are gathered again for the backward pass."
        ),
    ] = True
    period: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Plan an outer loop, gradwire.LocalSGD: parameters are averaged every N steps.",
            show_default="with --fragments, the shortest for the link",
        ),
    ] = None
    fragments: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Plan an outer loop of N fragments, averaged in turn.",
            show_default="with --period, 1",
        ),
    ] = None
    delay: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="With an outer loop: steps from the start of an averaging to its end.",
            show_default="as many as hide it",
        ),
    ] = None
    recipe: Recipes = None
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of kernel speeds. If there is none, they are measured here and written to it.",
            show_default=False,
        ),
    ] = None
    validate: Annotated[
        bool,
        typer.Option(
            "--validate", help="Compare predictions with measurements in the lab; takes minutes, needs root."
        ),
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False

    @property
    def is_outer_loop(self) -> bool:
        """True to plan a `gradwire.LocalSGD`."""
        return self.period is not None or self.fragments is not None

    def check(self) -> None:
        """Raise ValueError for sizes and files that cannot be used."""
        check_positive("--bucket-mb", self.bucket_mb)
        if self.delay is not None and not self.is_outer_loop:
            raise ValueError("--delay is that of an outer loop: give its --period or --fragments too")
        if self.sharding is None and (self.num_shards or self.weights or not self.reshards):
            raise ValueError("--shards, --weights and --no-reshard go with --sharding")
        if self.sharding is not None and (self.is_outer_loop or self.bucket_mb or self.validate):
            raise ValueError(
                "--period, --fragments, --bucket-mb and --validate are those of DDP: leave out --sharding"
            )
        if self.calibration is not None and not self.calibration.exists():
            check_writable("--calibration", self.calibration)

    def recipes(self) -> list[str]:
        """Return the names of the recipes that communicate, each once."""
        chosen = [gradwire.recipe(spec) for spec in recipes_for(self.recipe, self.sharding)]
        for each in chosen:
            if not can_be_planned(each):
                raise ValueError(f"{each} is several recipes: plan each of them by itself")
        communicating = [str(each) for each in dict.fromkeys(chosen) if each.exchange.communicates]
        if self.is_outer_loop and not communicating:
            raise ValueError("an outer loop needs a recipe that averages: give another --recipe than noop")
        return communicating

    def compute_s(self) -> float:
        """Return the time of a step without communication."""
        if self.compute_ms is None:
            raise ValueError("--compute-ms must be given: the time of noop in `gradwire headroom`")
        check_positive("--compute-ms", self.compute_ms)
        return self.compute_ms / 1e3

    def subject(self) -> list[Shape] | nn.Module:
        """Return the user's model, or the shapes of a typical one."""
        if self.model is not None and self.num_parameters is None:
            model = ModelFactory(self.model).build().model
            if not shapes_of(model):
                raise ValueError(f"the model of {self.model} has no parameters to train")
            return model
        if self.model is not None or self.num_parameters is None:
            raise ValueError("give --parameters or --model, one of them")
        if not 1 <= self.num_parameters <= _MAX_PARAMETERS:
            raise ValueError(
                f"--parameters must be from 1 to {_MAX_PARAMETERS:g}, not {self.num_parameters:g}"
            )
        return typical_shapes(int(self.num_parameters))

    def sharded_plan(self, cluster: Cluster) -> ShardedPlan | None:
        """Return how the model is sharded on a cluster; None for DDP."""
        if self.sharding is None:
            return None
        usual = cluster.num_workers if self.sharding == "fsdp" else cluster.workers_per_node
        return ShardedPlan(Sharding(self.sharding, self.num_shards or usual), self.weights, self.reshards)

    def clusters(self) -> list[Cluster]:
        """Return a cluster for each number of nodes."""
        bits_per_s, latency_s = self.bits_per_s, self.latency_us * 1e-6
        numbers = _numbers(_NODES if self.nodes is None else self.nodes)
        return [Cluster(n, self.num_workers, bits_per_s, latency_s) for n in numbers]

    @property
    def bits_per_s(self) -> float:
        """The rate of each node's link; raises ValueError if it is none."""
        return parse_rate(_LINK if self.link is None else self.link)

    def lab_cases(self) -> list[LabCase]:
        """Return the cases to validate with: those of ``nodes``, or those for which there are cores.

        With a ``link``, any number of nodes has a case.
        """
        known = dict.fromkeys(case.num_hosts for case in LAB_CASES)
        if self.nodes is None:
            most = MAX_HOSTS_PER_CORE * Machine.here().num_cores
            numbers = [number for number in known if number <= most]
        else:
            numbers = _numbers(self.nodes)
        if min(numbers) < 2:
            raise ValueError(f"--validate measures 2 or more hosts, not {self.nodes}")
        if self.link is not None:
            parse_rate(self.link)
            return [LabCase(number, self.link) for number in numbers]
        for number in numbers:
            if number not in known:
                known_text = ", ".join(map(str, known))
                raise ValueError(
                    f"--validate measures {known_text} hosts, not {number}; for other numbers, give a --link"
                )
        return [case for case in LAB_CASES if case.num_hosts in numbers]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--nodes takes numbers, such as 2,8,64, not {text!r}") from None
