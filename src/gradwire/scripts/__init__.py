"""Run training scripts as they are, with gradwire attached to every DDP model they make."""

from gradwire.scripts.launching import Script, run_script, show_error
from gradwire.scripts.summary import summarize

__all__ = ["Script", "run_script", "show_error", "summarize"]
