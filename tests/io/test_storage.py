"""Retries of requests to remote storage."""

import threading

import pytest

from toolkit.io import storage


def test_no_attempt_follows_a_cancellation(monkeypatch):
    monkeypatch.setattr(storage, "FIRST_DELAY", 60.0)
    cancelled, attempts = threading.Event(), []

    def request():
        attempts.append(len(attempts))
        threading.Timer(0.05, cancelled.set).start()
        raise ConnectionError("reset by peer")

    with pytest.raises(storage.StorageError, match="reset by peer"):
        storage.retry(request, "s3://bucket/run", attempts=3, cancelled=cancelled)
    assert attempts == [0]
