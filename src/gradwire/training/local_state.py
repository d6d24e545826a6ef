"""Checks of a state of `LocalSGD`."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.averaging import checkpoint


def require_keys(state: object) -> int:
    """Return the step of a state; ValueError or TypeError if it is not that of a LocalSGD."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state of LocalSGD is a mapping, not {type(state).__name__}")
    for key in ("num_steps", "start", "momentum", "averaging", "wire"):
        if key not in state:
            raise ValueError(f"this is no state of a LocalSGD: it has no {key!r}")
    return checkpoint.require_count("num_steps", state["num_steps"])


def require_all_ranks(key: str, part: object, size: int) -> None:
    """Raise ValueError if a part was saved on another number of ranks and lacks the residuals of one."""
    fields = checkpoint.check_fields(part)
    saved, there = fields.world_size, [f"rank{rank}" for rank in fields.memory]
    if fields.entries and saved not in (size, len(there)):
        raise ValueError(
            f"this state was saved on {saved} ranks and this group has {size}, but its {key!r} has only the "
            f"residuals of {', '.join(there)}: put gradwire.merge_state_dicts of every rank's {key!r} there, "
            "or save what state_dict(gather=True) returns"
        )
