"""Detect process exits before the process group exists.

Each rank keeps a TCP connection to rank 0. The operating system closes it when the process exits for any reason, and
keepalive probes close it about 30 seconds after a node loses power.
"""

import ipaddress
import selectors
import socket
import threading
from contextlib import suppress
from typing import Any

from torch.distributed import Store

ADDRESS = "lifeline"  # the key of rank 0's address
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # seconds, seconds, probes


class Lifeline:
    """A rank's connection to rank 0 (on rank 0, the connections of all ranks). It is open until :meth:`close`.

    If connections fail, for example behind a firewall, only timeouts detect a lost rank.

    Args:
        store: Store at which rank 0 publishes its address.
        host, port: Address of the store. Rank 0 listens on the interface that reaches it; on all if it is loopback.
        rank: Rank of this process.
    """

    def __init__(self, store: Store, host: str, port: int, rank: int) -> None:
        self.lost: set[int] = set()
        """Ranks whose processes have exited."""
        self.is_watching = True
        """Set to False when the process group takes over; later exits are not recorded."""
        self._closed = threading.Event()
        connection = _listen(store, host, port) if rank == 0 else _connect(store, host, rank)
        if connection is not None:
            watch = self._watch_peers if rank == 0 else self._watch_rank0
            threading.Thread(target=watch, args=[connection], daemon=True).start()

    def close(self) -> None:
        """Close rank 0's connections, which ends the threads of all ranks."""
        self._closed.set()

    def _mark_lost(self, rank: int) -> None:
        if self.is_watching:
            self.lost.add(rank)

    def _watch_peers(self, server: socket.socket) -> None:
        rank_of: dict[Any, int] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in selector.select(timeout=0.5):
                    peer: Any = key.fileobj
                    if peer is server:
                        with suppress(OSError):  # the peer may have disconnected already
                            selector.register(_keep_alive(server.accept()[0]), selectors.EVENT_READ)
                    elif data := _receive(peer):  # the first message is the peer's rank
                        rank_of.setdefault(peer, int.from_bytes(data, "big"))
                    else:
                        selector.unregister(peer)
                        peer.close()
                        if peer in rank_of:
                            self._mark_lost(rank_of[peer])
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _watch_rank0(self, connection: socket.socket) -> None:
        with connection:
            _receive(connection)  # returns when rank 0 exits or closes the connection
        self._mark_lost(0)


def _listen(store: Store, host: str, port: int) -> socket.socket | None:
    """Open rank 0's server and publish its address at the store, or an empty string if that fails."""
    try:
        with socket.create_connection((host, port), timeout=10) as probe:
            family, local_address = probe.family, probe.getsockname()[0]
        if ipaddress.ip_address(local_address).is_loopback:  # a local store: other nodes connect to the store's host
            local_address = ""
        server = socket.create_server((local_address, 0), family=family)
    except OSError:
        store.set(ADDRESS, "")
        return None
    store.set(ADDRESS, f"{local_address} {server.getsockname()[1]}")
    return server


def _connect(store: Store, host: str, rank: int) -> socket.socket | None:
    """Connect to rank 0 at its published address. Return None on failure, for example behind a firewall."""
    address, _, port = store.get(ADDRESS).decode().rpartition(" ")
    if not port:
        return None
    try:
        connection = _keep_alive(socket.create_connection((address or host, int(port)), timeout=10))
        connection.sendall(rank.to_bytes(4, "big"))
    except OSError:
        return None
    connection.settimeout(None)
    return connection


def _receive(connection: socket.socket) -> bytes:
    """Return a message; empty if the peer has exited."""
    try:
        return connection.recv(4)
    except OSError:
        return b""


def _keep_alive(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
