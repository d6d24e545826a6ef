"""A stand-in for the events and streams that torch lacks on CPU."""


class NoEvent:
    """An event or a stream of a device whose work is done when its calls return, as a CPU's is."""

    def record(self):
        pass

    def wait(self, stream=None):
        pass

    def wait_stream(self, stream):
        pass
