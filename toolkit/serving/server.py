"""Open the port and serve until a signal."""

from __future__ import annotations

import errno
import signal
import socket
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from toolkit.errors import StoppedBySignalError, UserError


def open_socket(host: str, port: int) -> socket.socket:
    """Listen on a port. Raises UserError if that is not possible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: is in use; choose another port") from error
        if error.errno == errno.EACCES:
            raise UserError(f"--port {port}: {error.strerror}; choose a port from 1024") from error
        raise UserError(f"--host {host}: {error.strerror or error}") from error


def run_server(app: ASGIApp, listener: socket.socket, shutdown_timeout: int) -> None:
    """Serve until SIGINT or SIGTERM. Running requests then get ``shutdown_timeout`` seconds; new ones are refused.

    Raises StoppedBySignalError after SIGTERM, KeyboardInterrupt after SIGINT.
    """
    # uvicorn raises the signal again when it has ended; a shell lets its background jobs ignore SIGINT
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=shutdown_timeout)
    uvicorn.Server(config).run(sockets=[listener])


def _stop(number: int, frame: object) -> NoReturn:
    raise StoppedBySignalError(number, "stopped by SIGTERM")
