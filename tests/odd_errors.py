"""Errors that are hard to copy or to mix with others."""


class NeedsMore(RuntimeError):
    """An error that cannot be made from a text."""

    __slots__ = ("number",)

    def __init__(self, record):
        super().__init__(f"bad record {record.number}")
        self.number = record.number


class Final(Exception):
    """An error that cannot be mixed with another."""

    def __init_subclass__(cls):
        raise TypeError("Final has no subclasses")


class Record:
    number = 7
