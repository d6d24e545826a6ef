"""The ``gradwire`` command: one file for each of its commands."""

from gradwire.cli.app import app, main

__all__ = ["app", "main"]
