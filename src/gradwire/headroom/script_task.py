"""Values that go as JSON to the process of a script's rank, and come back from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from gradwire.headroom.records import Proposal
from gradwire.scripts import Script
from gradwire.tuning import DecisionSummary


@dataclass(frozen=True)
class ScriptTask:
    """The script that a rank runs, its recipe, and the number of steps after which it ends."""

    script: Script
    recipe: str | None
    """None for plain DDP."""
    num_steps: int
    budget: float | None = None
    """The budget of recipe ``auto``, to say what it would send; None to leave that out."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ScriptTask:
        """Read back what `to_json` wrote."""
        fields = json.loads(text)
        script = fields.pop("script")
        name, arguments = script["name"], tuple(script["arguments"])
        return cls(Script(name, arguments, script["is_module"]), **fields)


@dataclass(frozen=True)
class WireTotals:
    """The figures of all models of a script together; None if unknown."""

    num_models: int
    num_refused: int
    """The number of models that the recipe cannot be attached to."""
    bytes_per_step: int | None
    num_messages: int | None
    wait_ms: float | None
    work_ms: float | None
    num_parameters: int
    gradient_bytes: int
    exact_bytes: int
    """Bytes that a rank has to send in a step for exact gradients, in rings."""
    sharding: str | None
    """``fsdp`` or ``hsdp`` if all models are sharded so; otherwise None."""
    decisions: tuple[tuple[DecisionSummary, ...], ...] = ()
    """The decisions of recipe ``auto`` for each model; empty if there are none."""
    num_layers: int | None = None
    """Number of layers of the model with the fewest."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> WireTotals:
        """Read back what `dataclasses.asdict` and JSON made."""
        decisions = tuple(tuple(map(_read_summary, model)) for model in fields.pop("decisions"))
        return cls(**fields, decisions=decisions)


def _read_summary(fields: dict[str, Any]) -> DecisionSummary:
    counts = tuple(map(tuple, fields.pop("counts")))
    return DecisionSummary(**fields, counts=counts)


@dataclass(frozen=True)
class ScriptResult:
    """One rank's figures for one run of a script."""

    times_s: tuple[float, ...]
    """Time of each step, from one call of an optimizer to the next."""
    num_threads: int
    backend: str
    device: str
    num_optimizer_steps: int
    """The steps that the script took, one more than there are times."""
    wires: WireTotals | None
    """None with plain DDP, whose messages nobody counts."""
    proposal: Proposal | None = None
    """The choice of recipe ``auto``; None if the task does not ask for it, or no model can have it."""
    no_proposal: str | None = None
    """The models that it leaves out, all or some, and why, in a sentence; None if it leaves out none."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ScriptResult:
        """Read back what `to_json` wrote."""
        fields = json.loads(text)
        fields["times_s"] = tuple(fields["times_s"])
        if fields["wires"] is not None:
            fields["wires"] = WireTotals.from_fields(fields["wires"])
        if fields["proposal"] is not None:
            counts = tuple(map(tuple, fields["proposal"].pop("counts")))
            fields["proposal"] = Proposal(**fields["proposal"], counts=counts)
        return cls(**fields)
