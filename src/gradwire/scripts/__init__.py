"""Run a training script as it is, with gradwire attached to every DDP model that it makes.

Measuring the script does not belong here.
"""

from gradwire.scripts.launching import Script, run_script, show_error
from gradwire.scripts.observing import SPAWN_HINT, Observations, observe
from gradwire.scripts.state_files import ScriptStates
from gradwire.scripts.summary import summarize

__all__ = [
    "SPAWN_HINT",
    "Observations",
    "Script",
    "ScriptStates",
    "observe",
    "run_script",
    "show_error",
    "summarize",
]
