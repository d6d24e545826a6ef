"""The tests, and patience for a machine that is busy.

Ranks import this too, with the functions that they run. A wire soon gives up a store that does not answer,
and ranks that do not say that they are there. In tests they are only slow, unless a test makes them fail.
"""

import sys

from gradwire.peers import failure, failure_store

if "pytest" in sys.modules:  # the checks on GPUs, which run without it, have a machine to themselves
    failure_store._PATIENCE_S = failure._ROLL_CALL_S = 60.0
