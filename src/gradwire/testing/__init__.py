"""Test distributed code, and any DDP communication hook, on real or virtual ranks of one machine.

The ranks themselves are started by `ranks`; tests of gradwire's own parts do not belong here.

Example, as a pytest test::

    from gradwire.testing import check_hook, run_ranks

    def world_sum(rank):
        total = torch.tensor([rank])
        torch.distributed.all_reduce(total)
        return total.item()

    def test_all_reduce_adds():
        assert run_ranks(world_sum, world_size=3) == [3, 3, 3]

    def test_my_hook_keeps_the_contract():
        report = check_hook(my_hook, world_size=2, tolerance=1e-5)
        assert report.ok, report
"""

from gradwire.ranks import RanksFailed, run_ranks, send_message
from gradwire.testing.averagers import AveragerCase, check_averager
from gradwire.testing.case_runs import CaseResult, Report
from gradwire.testing.matrix import Case, cases, check_hook
from gradwire.testing.sharded import ShardedCase, check_sharded
from gradwire.testing.virtual import VirtualRanks
from gradwire.testing.virtual_group import run_virtual_ranks
from gradwire.testing.virtual_hsdp import VirtualHSDP

__all__ = [
    "AveragerCase",
    "Case",
    "CaseResult",
    "RanksFailed",
    "Report",
    "ShardedCase",
    "VirtualHSDP",
    "VirtualRanks",
    "cases",
    "check_averager",
    "check_hook",
    "check_sharded",
    "run_ranks",
    "run_virtual_ranks",
    "send_message",
]
