"""The list of all private names, and a search for those that the installed torch lacks."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from gradwire.torch_private.autograd import AUTOGRAD_NAMES
from gradwire.torch_private.ddp import DDP_NAMES
from gradwire.torch_private.fsdp import FSDP_NAMES
from gradwire.torch_private.groups import GROUP_NAMES
from gradwire.torch_private.tensors import TENSOR_NAMES
from gradwire.torch_private.zero import ZERO_NAMES

KINDS = ("group", "options", "ddp", "zero", "scaler", "param_group", "fsdp_param")
"""The objects whose attributes are listed; the last two are those of ``fully_shard``."""


@dataclass(frozen=True)
class PrivateName:
    """A name of torch that torch may rename or drop."""

    path: str
    """``module:name``, or ``kind:name`` for an attribute of an object of one of `KINDS`."""
    purpose: str
    instead: str
    """The replacement if the name is gone."""


PRIVATE_NAMES = tuple(
    PrivateName(*row)
    for rows in (AUTOGRAD_NAMES, TENSOR_NAMES, GROUP_NAMES, DDP_NAMES, ZERO_NAMES, FSDP_NAMES)
    for row in rows
)


def missing_names(**objects: Any) -> list[PrivateName]:
    """Return the private names that the installed torch lacks.

    Args:
        objects: an object of each of `KINDS`, to look for the names that objects have. Names of objects that
            are not given are left out.
    """
    return [private for private in PRIVATE_NAMES if not _is_present(private.path, objects)]


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
