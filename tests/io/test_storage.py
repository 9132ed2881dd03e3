"""Retries of requests to remote storage."""

import asyncio
import gc
import threading

import fsspec.asyn
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


@pytest.mark.parametrize(("error", "lines"), [(ConnectionResetError("closing transport"), 0), (ValueError("ours"), 1)])
def test_only_lost_connections_of_tasks_that_nothing_awaits_are_silent(error, lines, caplog):
    fs = storage.Storage("s3://bucket/run", "--out_dir").fs

    async def write():
        raise error

    async def drop():
        task = fs.loop.create_task(write())
        while not task.done():
            await asyncio.sleep(0)

    fsspec.asyn.sync(fs.loop, drop)
    gc.collect()
    assert [record.name for record in caplog.records].count("asyncio") == lines
