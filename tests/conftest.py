"""Fixtures of toolkit's own tests."""

import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import pytest

from toolkit import extension


@pytest.fixture(scope="module", autouse=True)
def _without_installed_extensions():
    """The packages of extensions/ are installed and would add names; they have tests of their own."""
    with mock.patch.object(extension, "_installed", dict):
        yield


@pytest.fixture
def web(monkeypatch):
    """The address of a server of the files in the current folder."""
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
