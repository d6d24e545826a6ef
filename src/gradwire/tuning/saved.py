"""A policy's state as text, for checkpoints: written, and checked when it is read."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, get_args

from gradwire.recipes import ENCODINGS
from gradwire.tuning.choices import EncodingChoice
from gradwire.tuning.decisions import Decision
from gradwire.tuning.errors import ErrorTable
from gradwire.tuning.policy_state import Phase, PolicyState
from gradwire.tuning.times import UNKNOWN, Times
from gradwire.tuning.trials import Candidate, Trial
from gradwire.tuning.units import TuningUnit

# The most decisions that a checkpoint holds: the latest ones.
_NUM_KEPT = 50
# More gradients than a rank holds, 256 GB in fp32. To sample what a damaged state asks for may take for ever.
_MOST_VALUES = 1 << 36
# Fields that states of earlier versions do not have, with their values then.
_ADDED: dict[str, Any] = {"retry": 1, "times": dataclasses.asdict(UNKNOWN), "units": [], "apart": []}


def write_state(state: PolicyState) -> str:
    """Return a state as JSON; the same text on every rank."""
    kept = dataclasses.replace(state, decisions=state.decisions[-_NUM_KEPT:])
    return json.dumps(dataclasses.asdict(kept), sort_keys=True)


def read_state(text: str) -> PolicyState:
    """Return the state that `write_state` was given; ValueError names what is wrong."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or {*found, *_ADDED} != {
            f.name for f in dataclasses.fields(PolicyState)
        }:
            raise ValueError("its fields are not those of a policy")
        found = {**_ADDED, **found}
        return PolicyState(
            rung=_whole(found["rung"], least=1),
            phase=_one_of(found["phase"], get_args(Phase)),
            since=_whole(found["since"]),
            next_look=_whole(found["next_look"]),
            next_check=_whole(found["next_check"]),
            interval=_whole(found["interval"], least=1),
            retry=_whole(found["retry"], least=1),
            finest=_whole(found["finest"], least=1),
            coarsest=_whole(found["coarsest"]),
            credit=_finite(found["credit"]),
            credited=_whole(found["credited"]),
            looking=_number(found["looking"]),
            num_off=_whole(found["num_off"]),
            recent=_numbers(found["recent"]),
            times=_times(found["times"]),
            units=_units(found["units"]),
            used=tuple(map(_bool, _list(found["used"]))),
            choice=None if found["choice"] is None else _choice(found["choice"]),
            table=None if found["table"] is None else _table(found["table"]),
            apart=_names(found["apart"]),
            trial=None if found["trial"] is None else _trial(found["trial"]),
            decisions=[_decision(each) for each in _list(found["decisions"])],
            is_scattered=_bool(found["is_scattered"]),
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"this is no state of a wire: its tuning cannot be read ({error}); load an undamaged checkpoint"
        ) from None


def _choice(found: object) -> EncodingChoice:
    fields = _fields(found, EncodingChoice)
    error = None if fields["error"] is None else _number(fields["error"])
    return EncodingChoice(_encodings(fields["encodings"]), _whole(fields["num_bytes"]), error)


def _times(found: object) -> Times:
    fields = _fields(found, Times)
    return Times(_number(fields["step"]), _number(fields["exposed"]), _number(fields["averaging"]))


def _units(found: object) -> tuple[TuningUnit, ...]:
    units = tuple(map(_unit, _list(found)))
    if sum(unit.numel for unit in units) > _MOST_VALUES:
        raise ValueError("its units are larger than a rank's memory")
    return units


def _unit(found: object) -> TuningUnit:
    fields = _fields(found, TuningUnit)
    names, sizes = _names(fields["names"]), tuple(map(_whole, _list(fields["sizes"])))
    bucket, begin = _whole(fields["bucket"]), _whole(fields["begin"])
    numel, num_chunks = _whole(fields["numel"], least=1), _whole(fields["num_chunks"], least=1)
    if len(names) != len(sizes):
        raise TypeError("a unit has no names")
    if num_chunks * sum(sizes) != numel:
        raise ValueError("a unit has other sizes")
    return TuningUnit(bucket, begin, numel, names, sizes, num_chunks)


def _table(found: object) -> ErrorTable:
    fields = _fields(found, ErrorTable)
    return ErrorTable(
        list(_numbers(fields["norms"])), [list(_numbers(row)) for row in _list(fields["errors"])]
    )


def _trial(found: object) -> Trial:
    fields = _fields(found, Trial)
    challengers = tuple(map(_candidate, _list(fields["challengers"])))
    trial = Trial(
        _candidate(fields["kept"]), challengers, _numbers(fields["kept_s"]), _numbers(fields["new_s"])
    )
    if not challengers or not trial.kept_s or not 0 <= len(trial.kept_s) - len(trial.new_s) <= 1:
        raise ValueError("a trial compares nothing")
    return trial


def _candidate(found: object) -> Candidate:
    fields = _fields(found, Candidate)
    return Candidate(_whole(fields["rung"], least=1), _choice(fields["choice"]), _number(fields["expected"]))


def _decision(found: object) -> Decision:
    fields = _fields(found, Decision)
    figures = {
        name: None if fields[name] is None else _number(fields[name])
        for name in ("step_ms", "exposed_ms", "bytes_per_s", "error", "expected_ms", "got_ms")
    }
    if not isinstance(fields["reason"], str):
        raise TypeError("a reason is no text")
    return Decision(
        step=_whole(fields["step"]),
        reason=fields["reason"],
        encodings=_encodings(fields["encodings"]),
        bytes_per_step=_whole(fields["bytes_per_step"]),
        looking=_number(fields["looking"]),
        **figures,
    )


def _encodings(found: object) -> dict[str, str]:
    if not isinstance(found, dict):
        raise TypeError("encodings are no mapping")
    return {name: _one_of(encoding, ENCODINGS) for name, encoding in found.items()}


def _fields(found: object, kind: type) -> dict[str, Any]:
    if not isinstance(found, dict) or found.keys() != {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"{kind.__name__} has other fields")
    return found


def _names(found: object) -> tuple[str, ...]:
    names = _list(found)
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a name is no text")
    return tuple(names)


def _list(found: object) -> list[Any]:
    if not isinstance(found, list):
        raise TypeError("a list is missing")
    return found


def _bool(found: object) -> bool:
    if not isinstance(found, bool):
        raise TypeError(f"{found!r:.40} is not true or false")
    return found


def _whole(found: object, least: int = 0) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 2**48:
        raise ValueError(f"{found!r:.40} is no whole number from {least} on")
    return found


def _number(found: object) -> float:
    number = _finite(found)
    if number < 0:
        raise ValueError(f"{found!r:.40} is no number from 0 on")
    return number


def _numbers(found: object) -> tuple[float, ...]:
    return tuple(map(_number, _list(found)))


def _finite(found: object) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise ValueError(f"{found!r:.40} is no finite number")
    return float(found)


def _one_of(found: object, allowed: tuple[Any, ...]) -> Any:
    if found not in allowed:
        raise ValueError(f"{found!r:.40} is none of {', '.join(map(str, allowed))}")
    return found
