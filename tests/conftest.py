"""Settings that must stand before anything imports Triton or resolves a name, and fixtures."""

import contextlib
import importlib.util
import os

import pytest

# `make test-frameworks` runs these, in an environment with the frameworks.
collect_ignore = [] if importlib.util.find_spec("lightning") else ["frameworks"]

# Triton's interpreter then runs the CUDA kernels on CPU.
os.environ["TRITON_INTERPRET"] = "1"
# A connection to a torch store asks for its peer's name; where the question gets lost, glibc waits 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

with contextlib.suppress(ModuleNotFoundError):  # the environment of the frameworks has none
    from hypothesis import HealthCheck, settings

    # The same examples in every run, however long a busy machine takes for one.
    settings.register_profile(
        "gradwire", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("gradwire")


def kept(world_size):
    """Make a fixture: ranks that all tests of a module share."""

    @pytest.fixture(scope="module")
    def ranks():
        from tests.kept_ranks import kept_ranks

        with kept_ranks(world_size) as found:
            yield found

    return ranks


two_ranks, three_ranks, four_ranks = kept(2), kept(3), kept(4)
