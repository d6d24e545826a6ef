"""A mark for tests that need a lab: root, Linux namespaces and iproute2."""

import pytest

from gradwire.lab import Lab, LabUnavailable


def unavailable():
    """Return why this machine has no lab; an empty text if it has one."""
    try:
        Lab(1).close()
    except LabUnavailable as error:
        return str(error)
    return ""


needs_lab = pytest.mark.skipif(bool(reason := unavailable()), reason=reason)
