"""Join two network namespaces with a link that drops and delays packets: ``python lossy_link.py NAME NAME``.

For kernels without netem: each namespace gets a TUN device ``cable``, and this process passes the packets on. It prints
a line when the devices exist, and ends, with the devices, when its standard input is closed.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

LOSS, DELAY_S = 0.05, 0.002
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000


def open_tun(namespace: str) -> int:
    """Return the file descriptor of a new TUN device in a namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"cable", IFF_TUN | IFF_NO_PI))
    return tun


def relay(first: int, second: int) -> None:
    chance, other, waiting = random.Random(0), {first: second, second: first}, deque[tuple[float, int, bytes]]()
    while True:
        seconds = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([first, second, sys.stdin], [], [], seconds)[0]
        if sys.stdin in ready:
            return
        for tun in ready:
            packet = os.read(tun, 1 << 16)
            if chance.random() >= LOSS:
                waiting.append((time.monotonic() + DELAY_S, other[tun], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, tun, packet = waiting.popleft()
            with suppress(OSError):  # the device is down
                os.write(tun, packet)


if __name__ == "__main__":
    tuns = [open_tun(name) for name in sys.argv[1:]]
    print("ready", flush=True)
    relay(*tuns)
