"""Run a training script as it is, with gradwire attached to every DDP model that it makes.

Measuring the script does not belong here.
"""

from gradwire.scripts.launching import Script, run_script, show_error
from gradwire.scripts.summary import summarize

__all__ = ["Script", "run_script", "show_error", "summarize"]
