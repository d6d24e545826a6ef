"""The current CUDA stream: a block that uses another leaves all devices as they were."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.lanes.current_stream import StreamInUse


class Device:
    """Stand-ins for the current device, and for the current streams of two devices."""

    def __init__(self, monkeypatch):
        self.current = 0
        self.streams = [SimpleNamespace(device_index=index, name=f"default {index}") for index in range(2)]
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: self.streams[index])
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)

    def set_stream(self, stream):
        self.current = stream.device_index
        self.streams[stream.device_index] = stream

    def state(self):
        return self.current, [stream.name for stream in self.streams]


@pytest.mark.parametrize("index", [0, 1])
def test_a_stream_is_used_inside_the_block_alone(index, monkeypatch):
    device = Device(monkeypatch)
    before = device.state()
    with pytest.raises(KeyError), StreamInUse(SimpleNamespace(device_index=index, name="side")):
        current, names = device.state()
        assert (current, names[index]) == (index, "side")
        raise KeyError
    assert device.state() == before
