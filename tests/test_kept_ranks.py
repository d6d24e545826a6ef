"""Ranks that are kept from test to test."""

import threading

import pytest
import torch.distributed as dist

from gradwire.testing import RanksFailed
from tests.kept_ranks import kept_ranks

_seen = []


def scenario_noting(rank, word, expected):
    _seen.append(word)
    assert _seen == expected
    dist.barrier()


def scenario_failing(rank):
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def scenario_hanging(rank):
    if rank == 1:
        threading.Event().wait()


def test_scenarios_run_on_the_same_ranks_until_one_fails():
    with kept_ranks(2) as ranks:
        ranks.run(scenario_noting, "one", ["one"])
        ranks.run(scenario_noting, "two", ["one", "two"])
        with pytest.raises(RanksFailed, match="KeyError: 'the reason'"):
            ranks.run(scenario_failing)
        ranks.run(scenario_noting, "three", ["three"])


def test_a_scenario_that_hangs_is_ended_with_its_stack():
    with kept_ranks(2, scenario_s=3) as ranks:
        with pytest.raises(RanksFailed, match="in scenario_hanging"):
            ranks.run(scenario_hanging)
        ranks.scenario_s = 180.0
        ranks.run(scenario_noting, "one", ["one"])
