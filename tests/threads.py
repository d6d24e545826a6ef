"""The threads of gradwire in this process."""

import threading


def lasting_threads():
    """Return the threads of wires, without those that ask a store and then end by themselves."""
    found = [thread for thread in threading.enumerate() if thread.name.startswith("gradwire")]
    return [thread for thread in found if thread.name != "gradwire-store"]
