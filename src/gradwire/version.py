"""The version of gradwire, in a module that any package can import: ranks compare it."""

__version__ = "0.1.0"
