"""The ``gradwire`` command: options, help texts, output and exit codes.

Measuring and predicting do not belong here: the commands call other packages for that.
"""

from gradwire.cli.app import app, main
from gradwire.cli.run import run as run_command

__all__ = ["app", "main", "run_command"]
