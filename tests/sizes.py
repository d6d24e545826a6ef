"""Numbers of ranks: one for `make test`, the others for `make test-full`."""

import pytest


def usually(size, *, otherwise):
    """Return the values of a parameter: ``size``, and the others for `make test-full` only."""
    return [size, *(pytest.param(other, marks=pytest.mark.full) for other in otherwise)]
