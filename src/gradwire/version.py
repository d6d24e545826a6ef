"""The version, in a room of its own: ranks compare it, and the front door is above them all."""

__version__ = "0.1.0.dev0"
