"""The options of ``gradwire headroom``, and the benchmark or script that they describe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import torch
import typer

from gradwire.averaging import is_disabled
from gradwire.cli.options import Html, Model, Recipes, ShardingKind, check_positive, recipes_for
from gradwire.headroom import Benchmark, ModelFactory, Sharding, Workload
from gradwire.links import format_rate, parse_delay, parse_rate
from gradwire.processes import under_torchrun
from gradwire.scripts import Script

# On a 1 Gbit/s link, buckets of 8 MB instead of DDP's 25 gained as much as a recipe.
_SMALL_BUCKET_MB = 8.0
# Width and sequence length of each built-in model, by its name.
_DEFAULT_SIZES = {"transformer": (512, 64), "resnet": (256, 16)}
# Options and their fields: those of a built-in model, and all that a script decides for itself.
_OF_BUILT_IN = {
    "--workload": "workload",
    "--width": "width",
    "--layers": "num_layers",
    "--batch": "batch",
    "--sequence": "sequence",
}
_OF_MODELS = {
    "--model": "model",
    **_OF_BUILT_IN,
    "--seconds": "seconds",
    "--bucket-mb": "bucket_mb",
    "--device": "device",
    "--sharding": "sharding",
    "--shards": "num_shards",
}


@dataclass(frozen=True)
class HeadroomOptions:
    """The options as the user gave them."""

    script_words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGUMENTS]", help="Your own training script, unchanged; or -m MODULE."
        ),
    ] = None
    num_ranks: Annotated[
        int,
        typer.Option("--ranks", min=1, metavar="N", help="Processes on this machine, one thread each."),
    ] = 2
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,...",
            help="Measure on slow links: one or more rates, such as 100mbit,1gbit. Each rank runs on a host "
            "of a lab (`gradwire lab --help`).",
            show_default=False,
        ),
    ] = None
    delay: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Measure on long links: the time from host to host, such as 20ms. With --link or without.",
            show_default=False,
        ),
    ] = None
    recipe: Recipes = None
    model: Model = None
    workload: Annotated[
        str, typer.Option(metavar="NAME", help="A built-in model: transformer or resnet.")
    ] = "transformer"
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Width of the transformer, a multiple of 8 (default: 512); channels of the resnet "
            "(default: 256).",
            show_default=False,
        ),
    ] = None
    num_layers: Annotated[int, typer.Option("--layers", min=1, metavar="N", help="Residual blocks.")] = 6
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences or images per rank.")] = 2
    sequence: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens per sequence (default: 64); side of an image (default: 16).",
            show_default=False,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cpu or cuda; ranks may share a GPU. Default: cpu; under torchrun cuda, if there is a GPU.",
            show_default=False,
        ),
    ] = None
    num_steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            help="Timed steps per recipe. Fewer than 7 cannot rule out chance. Default: 8 to 24, by "
            "--seconds; for a script 16.",
            show_default=False,
        ),
    ] = None
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S", help="Approximate time to measure, with warm-up; a script is measured for --steps."
        ),
    ] = 45.0
    bucket_mb: Annotated[
        float | None,
        typer.Option(
            metavar="MB",
            help="DDP's bucket_cap_mb. Default: DDP's own; plain DDP and the best recipe also try 8 MB.",
            show_default=False,
        ),
    ] = None
    sharding: ShardingKind = None
    num_shards: Annotated[
        int | None,
        typer.Option(
            "--shards",
            min=1,
            metavar="N",
            help="With --sharding hsdp: ranks of a replica. Default: half of all; under torchrun those of "
            "a machine. With --link, each replica is a host.",
            show_default=False,
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="ERROR",
            help="Also say what `auto` would send with this budget, a relative error such as 0.3.",
            show_default=False,
        ),
    ] = None
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Also write the record; '-' writes it to stdout, and everything else to stderr.",
        ),
    ] = None
    html: Html = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the verdict.")] = False

    @property
    def recipes(self) -> Sequence[str]:
        """The recipes to compare."""
        return recipes_for(self.recipe, self.sharding)

    @property
    def num_hosts(self) -> int:
        """The number of hosts in a lab: one for each rank, or for each replica."""
        shards = self._shards()
        return (
            self.num_ranks if shards is None or shards.kind == "fsdp" else self.num_ranks // shards.num_shards
        )

    def check(self) -> None:
        """Raise ValueError if these options, or this process, cannot start a measurement."""
        size = os.environ.get("WORLD_SIZE", "1")
        if size != "1" and not under_torchrun():
            raise ValueError(
                f"this process is already one of {size} ranks (WORLD_SIZE), but torchrun did not start it: "
                "start it with torchrun, or by itself; for slow links, use --link instead of `gradwire lab`"
            )
        if is_disabled():
            raise ValueError("GRADWIRE_DISABLE is set, so that no recipe can be measured: unset it")
        check_positive("--seconds", self.seconds)
        check_positive("--bucket-mb", self.bucket_mb)

    def subject(self) -> Script | Benchmark:
        """Return the script or the benchmark to measure. Raises ValueError if there is none."""
        if not self.script_words:
            return self._benchmark()
        self._require_default(
            _OF_MODELS, "a script makes its own models, on its own devices, and is timed for --steps"
        )
        return Script.of(self.script_words, is_module=False)

    def rates(self) -> list[str | None]:
        """Return the rates of the links to measure with; None is the network as it is."""
        if (self.link or self.delay) and under_torchrun():
            option = "--link" if self.link else "--delay"
            raise ValueError(f"{option} makes hosts on this machine; leave it out, or leave out torchrun")
        if self.delay is not None:
            parse_delay(self.delay)
        if self.link is None:
            return [None]
        return [format_rate(parse_rate(rate)) for rate in self.link.split(",")]

    def _benchmark(self) -> Benchmark:
        sharding = self._shards()
        usual_device = "cuda" if under_torchrun() and torch.cuda.is_available() else "cpu"
        return Benchmark(
            self.recipes,
            self._workload(),
            self.num_steps,
            self.seconds,
            self.bucket_mb,
            small_bucket_mb=_SMALL_BUCKET_MB if self.bucket_mb is None and sharding is None else None,
            device=self.device or usual_device,
            budget=self.budget,
            sharding=sharding,
        )

    def _shards(self) -> Sharding | None:
        """Return the sharding, if there is one; ValueError if shards cannot be cut so."""
        if self.sharding is None:
            if self.num_shards is not None:
                raise ValueError("--shards goes with --sharding hsdp")
            return None
        size, local = self.num_ranks, max(1, self.num_ranks // 2)
        if under_torchrun():
            size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        made = Sharding(self.sharding, self.num_shards or (size if self.sharding == "fsdp" else local))
        made.num_replicas(size)
        return made

    def _workload(self) -> ModelFactory | Workload:
        if self.model is not None:
            self._require_default(_OF_BUILT_IN, "--model makes the model and its batch")
            return ModelFactory(self.model)
        width, sequence = _DEFAULT_SIZES.get(self.workload, _DEFAULT_SIZES["transformer"])
        return Workload(
            self.workload, self.width or width, self.num_layers, self.batch, self.sequence or sequence
        )

    def _require_default(self, options: Mapping[str, str], why: str) -> None:
        """Raise ValueError if one of these options, with its field, has another value than its default."""
        defaults = {field.name: field.default for field in fields(self)}
        given = [option for option, name in options.items() if getattr(self, name) != defaults[name]]
        if given:
            raise ValueError(f"{why}: leave out {', '.join(given)}")
