"""The network interface that gloo listens on.

gloo listens on the address of this host's name. Where that is a loopback address, as Debian writes it to /etc/hosts,
the other nodes cannot connect.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: get the IPv4 address of an interface
_ANY_HOST = "192.0.2.1"  # RFC 5737: nobody's; a datagram socket connected to it sends nothing


def choose_gloo_interface() -> None:
    """Let gloo listen on the interface that reaches MASTER_ADDR, if it would listen on a loopback address.

    Does nothing if GLOO_SOCKET_IFNAME is set, if all nodes are on this host, or where no IPv4 interface of Linux
    reaches MASTER_ADDR.
    """
    host = os.environ.get("MASTER_ADDR", "localhost")
    if os.environ.get(GLOO_INTERFACE) or host == "localhost" or _is_loopback(host):
        return
    if not all(map(_is_loopback, _addresses(socket.gethostname()))):
        return
    for target in (host, _ANY_HOST):  # on node 0, the host may be its own name
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            local_address = probe.getsockname()[0]
            if not _is_loopback(local_address) and (name := _find_interface(local_address)) is not None:
                os.environ[GLOO_INTERFACE] = name
                return


def _addresses(host: str) -> list[str]:
    with suppress(OSError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    return []


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _find_interface(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
