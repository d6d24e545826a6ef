"""The log of gradwire."""

import contextlib
import logging


@contextlib.contextmanager
def logged():
    """Collect what gradwire logs."""
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("gradwire").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
