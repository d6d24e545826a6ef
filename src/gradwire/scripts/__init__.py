"""Run a training script as it is, with gradwire attached to every DDP model that it makes.

Measuring the script does not belong here.
"""

from gradwire.scripts.children import RunTask, note_forks, reach_children, serve_as_child
from gradwire.scripts.launchers import hide_from_launchers, refuse_launchers
from gradwire.scripts.launching import Script, run_script, show_error
from gradwire.scripts.observing import Observations, observe
from gradwire.scripts.states import ScriptStates
from gradwire.scripts.summary import summarize

__all__ = [
    "Observations",
    "RunTask",
    "Script",
    "ScriptStates",
    "hide_from_launchers",
    "note_forks",
    "observe",
    "reach_children",
    "refuse_launchers",
    "run_script",
    "serve_as_child",
    "show_error",
    "summarize",
]
