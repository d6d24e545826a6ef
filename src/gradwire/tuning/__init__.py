"""Recipe ``auto``: it measures errors and times, and chooses an encoding for each parameter.

Encodings themselves belong to `codecs`, and the averaging by them to `exchanges`.
"""

from gradwire.tuning.choices import Chooser
from gradwire.tuning.decisions import Decision
from gradwire.tuning.policy import Policy
from gradwire.tuning.policy_state import PolicyState
from gradwire.tuning.proposal import propose
from gradwire.tuning.reports import StepReport, combine_reports
from gradwire.tuning.saved import read_state
from gradwire.tuning.summaries import DecisionSummary, decision_table
from gradwire.tuning.tuner import Tuner

__all__ = [
    "Chooser",
    "Decision",
    "DecisionSummary",
    "Policy",
    "PolicyState",
    "StepReport",
    "Tuner",
    "combine_reports",
    "decision_table",
    "propose",
    "read_state",
]
