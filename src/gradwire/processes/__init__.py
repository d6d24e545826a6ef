"""Child processes: watched together, and ended with all that they have started.

What they run is their caller's business.
"""

from gradwire.processes.children import end_group, end_with_parent, how_it_ended, wait_for_all

__all__ = [
    "end_group",
    "end_with_parent",
    "how_it_ended",
    "wait_for_all",
]
