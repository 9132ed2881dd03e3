"""Requests to remote storage: which of them s3fs repeats, and the line of each error."""

import asyncio
import errno
import gc
import random
from types import SimpleNamespace

import fsspec.asyn
import pytest
import s3fs.core
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError, NoCredentialsError
from helpers.cases import check_each

from toolkit.io.storage import ATTEMPTS, Storage, StorageError, describe


class Client:
    """The client of S3: the first ``n_failures`` requests fail."""

    def __init__(self, error: Exception, n_failures: int) -> None:
        self.error, self.n_failures, self.n_requests = error, n_failures, 0

    def __getattr__(self, name: str):
        async def request(**options) -> dict:
            self.n_requests += 1
            if self.n_requests <= self.n_failures:
                raise self.error
            return {"Contents": [{"Key": "run/name", "Size": 7}], "ContentLength": 7}

        return request


def answer(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Operation")


def test_s2_requests_are_repeated_if_that_may_help_without_draws_of_random(tmp_path, monkeypatch):
    waits = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(s3fs.core, "asyncio", type("asyncio", (), {**vars(asyncio), "sleep": wait}))
    (tmp_path / "file").write_text("content")
    transient = [answer("InternalError", 500), answer("SlowDown", 503), EndpointConnectionError(endpoint_url="x")]
    transient.append(ConnectionClosedError(endpoint_url="x"))
    lasting = [answer("AccessDenied", 403), answer("QuotaExceeded", 507), NoCredentialsError()]
    state = random.getstate()

    def check(error, n_failures, n_requests, name, *args):
        store, client = Storage("s3://bucket/run", "--out_dir"), Client(error, n_failures)

        async def get_client(*_) -> Client:
            return client

        store.fs.set_session = store.fs.get_s3 = get_client
        assert store.fs.config_kwargs["retries"] == {"total_max_attempts": 1}  # botocore draws its delays
        store.fs._kwargs_helper = SimpleNamespace(filter_dict=lambda operation, options: options)
        if n_failures < n_requests:
            getattr(store, name)(*args)
        else:
            with pytest.raises(StorageError) as raised:
                getattr(store, name)(*args)
            assert "\n" not in str(raised.value)
        assert (client.n_requests > n_failures) if n_failures < n_requests else (client.n_requests == n_requests)

    requests = [("upload", tmp_path / "file", "name"), ("write", "name", b"content"), ("entries",), ("exists", "name")]
    check_each(
        check,
        [(error, 3, 4, *request) for error in transient for request in requests]
        + [(error, 99, ATTEMPTS, "write", "name", b"content") for error in transient]
        + [(error, 99, 1, "write", "name", b"content") for error in lasting],
    )
    assert 20 < sum(waits[-ATTEMPTS:]) < 60 and random.getstate() == state


def test_errors_are_one_line_with_a_fix():
    def check(error, expected):
        error = s3fs.core.translate_boto_error(error)
        assert expected in describe(error) and "\n" not in describe(error) and "secret" not in describe(error)

    check_each(
        check,
        [
            (answer("SignatureDoesNotMatch", 403), "access denied (SignatureDoesNotMatch); check the key"),
            (answer("AuthorizationHeaderMalformed", 400), "set AWS_DEFAULT_REGION"),
            (answer("NoSuchBucket", 404), "no such bucket (NoSuchBucket); create it"),
            (answer("QuotaExceeded", 403), "the storage is full"),
            (answer("Anything", 507), "the storage is full"),
            (answer("InternalError", 500), "the storage failed (InternalError, HTTP status 500)"),
            (NoCredentialsError(), "no credentials (NoCredentialsError); set the storage's in the environment"),
            (PermissionError("secret"), "access denied (PermissionError)"),
            (EndpointConnectionError(endpoint_url="http://key:secret@host"), "the storage does not respond"),
            (
                OSError(errno.ENOSPC, "No space left on device"),
                "the storage is full (ENOSPC); free some space or raise",
            ),
            (ValueError("two\nlines"), "the storage failed (two lines)"),
        ],
    )


@pytest.mark.parametrize(("error", "lines"), [(ConnectionResetError("closing transport"), 0), (ValueError("ours"), 1)])
def test_only_lost_connections_of_tasks_that_nothing_awaits_are_silent(error, lines, caplog):
    fs = Storage("s3://bucket/run", "--out_dir").fs

    async def write():
        raise error

    async def drop():
        task = fs.loop.create_task(write())
        while not task.done():
            await asyncio.sleep(0)

    fsspec.asyn.sync(fs.loop, drop)
    gc.collect()
    assert [record.name for record in caplog.records].count("asyncio") == lines
