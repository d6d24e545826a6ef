"""Ranks that tests share; they import a framework in the first test of a module, which takes a while."""

import pytest

from tests.kept_ranks import kept_ranks


@pytest.fixture(scope="module")
def two_ranks():
    with kept_ranks(2, scenario_s=240.0) as found:
        yield found
