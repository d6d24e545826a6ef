"""TAP devices: network interfaces whose frames a program reads and writes."""

from __future__ import annotations

import fcntl
import os
import struct

_CONTROL = "/dev/net/tun"
# From linux/if_tun.h.
_SET_NAME = 0x400454CA
_SET_OFFLOAD = 0x400454D0
_IS_TAP, _NO_PACKET_INFO, _HAS_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS_4, _SEGMENTS_6 = 1, 2, 4


def open_tap(name: str) -> int:
    """Make a TAP device in the calling thread's network namespace, and return its open file.

    Frames have a header in front that says what is left to do: checksums, and cutting into segments. So TCP
    hands over up to 64 KiB at once, and a program can pass on a gigabit per second. The device ends with
    its file. Raises OSError if the kernel refuses.
    """
    file = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = _IS_TAP | _NO_PACKET_INFO | _HAS_HEADER
        fcntl.ioctl(file, _SET_NAME, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(file, _SET_OFFLOAD, _CHECKSUMS | _SEGMENTS_4 | _SEGMENTS_6)
    except OSError:
        os.close(file)
        raise
    return file
