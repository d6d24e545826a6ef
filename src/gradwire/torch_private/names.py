"""The list of all private names, and a search for those that the installed torch lacks."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.torch_private.autograd import AUTOGRAD_NAMES
from gradwire.torch_private.ddp import DDP_NAMES
from gradwire.torch_private.fsdp import FSDP_NAMES
from gradwire.torch_private.groups import GROUP_NAMES
from gradwire.torch_private.tensors import TENSOR_NAMES
from gradwire.torch_private.zero import ZERO_NAMES

KINDS = (
    "group",
    "options",
    "ddp",
    "zero",
    "scaler",
    "compiled",
    "stepped",
    "sharded",
    "fsdp_state",
    "param_group",
    "fsdp_param",
)
"""The objects whose attributes are listed.

``compiled`` is a model of ``torch.compile``, ``stepped`` a parameter that an optimizer steps in the backward
pass. The last four are those of ``fully_shard``: a module, its state, and what that holds.
"""


@dataclass(frozen=True)
class PrivateName:
    """A name of torch that torch may rename or drop."""

    path: str
    """``module:name``, or ``kind:name`` for an attribute of an object of one of `KINDS`."""
    purpose: str
    instead: str
    """The replacement if the name is gone."""
    since: tuple[int, int] | None = None
    """The first version of torch that has the name; None if all supported ones do."""
    before: tuple[int, int] | None = None
    """The first version of torch that lacks the name again; None if there is none yet."""

    def is_expected_in(self, version: tuple[int, int]) -> bool:
        """Return True if this version of torch should have the name."""
        return (self.since is None or version >= self.since) and (
            self.before is None or version < self.before
        )


PRIVATE_NAMES = tuple(
    PrivateName(*row)  # type: ignore[arg-type]
    for rows in (AUTOGRAD_NAMES, TENSOR_NAMES, GROUP_NAMES, DDP_NAMES, ZERO_NAMES, FSDP_NAMES)
    for row in rows
)


def missing_names(**objects: Any) -> list[PrivateName]:
    """Return the private names that the installed torch should have, and lacks.

    Args:
        objects: an object of each of `KINDS`, to look for the names that objects have. Names of objects that
            are not given are left out.
    """
    major, minor = map(int, torch.__version__.split(".")[:2])
    expected = [private for private in PRIVATE_NAMES if private.is_expected_in((major, minor))]
    return [private for private in expected if not _is_present(private.path, objects)]


def _is_present(path: str, objects: dict[str, Any]) -> bool:
    owner, _, names = path.partition(":")
    if owner in KINDS:
        if owner not in objects:
            return True
        found = objects[owner]
    else:
        try:
            found = importlib.import_module(owner)
        except ImportError:
            return False
    for name in names.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True
