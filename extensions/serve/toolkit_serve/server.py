"""Open the port and serve until a signal."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from toolkit.distributed.signals import SIGNALS
from toolkit.errors import StoppedBySignalError, UserError

CLIENT_TIMEOUT = 15  # seconds
MIN_RATE = 100  # bytes per second of a request that is being sent
LISTEN_BACKLOG = 128
ACCEPTS = 4  # per turn of the event loop; after four turns, a new connection can close an old one


def open_socket(host: str, port: int) -> socket.socket:
    """Listen on a port. Raises UserError if that is not possible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        hint = "choose another host, or another port from 1024"
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}; {hint}") from error


def run_server(app: ASGIApp, listener: socket.socket, shutdown_timeout: int, stop_requests: Callable[[], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Running requests then get ``shutdown_timeout`` seconds, after which
    ``stop_requests`` is called; new ones are refused.

    Raises KeyboardInterrupt after SIGINT, StoppedBySignalError after another signal.
    """
    server = Server(uvicorn.Config(
        app, loop="asyncio", http=Connection, ws="none", lifespan="off", log_level="error", access_log=False,
        backlog=ACCEPTS,
    ))  # fmt: skip
    server.shutdown_timeout, server.stop_requests = shutdown_timeout, stop_requests
    gc.freeze()  # a hostile body makes many objects; torch's would be searched with them
    server.run(sockets=[listener])
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt
    raise StoppedBySignalError(server.signal, f"stopped by {signal.Signals(server.signal).name}")


class Connection(H11Protocol):
    """A connection that ends if the server waits for its client, in CLIENT_TIMEOUT to twice that time.

    The server waits for the rest of a request, which must come at MIN_RATE, or for the client to read. If there are too
    many connections, a new one ends the oldest of them that is not being answered, so that new clients, such as checks
    of /health, always get in.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made_at, self._n_received = self.loop.time(), 0
        self._timer = self.loop.call_later(CLIENT_TIMEOUT, self._check, None)
        if len(self.connections) > min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 8):
            waiting = [c for c in self.connections if c.awaits_request]  # type: ignore[union-attr]
            min(waiting, key=lambda c: c._made_at).transport.abort()  # type: ignore[union-attr]

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def awaits_request(self) -> bool:
        is_reading = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        return is_reading and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        self._n_received += len(data)
        super().data_received(data)

    def _check(self, before: tuple[object, int] | None) -> None:
        now = self.cycle, self.transport.get_write_buffer_size()
        is_slow = self._n_received < MIN_RATE * CLIENT_TIMEOUT
        self._n_received = 0
        if now == before and (now[1] or (self.awaits_request and is_slow)):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(CLIENT_TIMEOUT, self._check, now)


class Server(uvicorn.Server):
    """Adds to uvicorn's server: SIGHUP, and requests that end with an error before their tasks are cancelled."""

    shutdown_timeout = signal = 0
    stop_requests: Callable[[], None]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in SIGNALS:
            # nohup ignores SIGHUP; a shell lets its background jobs ignore SIGINT, too
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signal = self.signal or sig
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)  # asyncio has set it to ACCEPTS

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self.shutdown_timeout, self.stop_requests)
        loop.call_later(self.shutdown_timeout + 1, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        """Close the connections of clients that neither send the rest of a request nor read its error."""
        for connection in self.server_state.connections:
            connection.transport.abort()
