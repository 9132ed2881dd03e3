"""Access a folder on remote storage, such as ``s3://bucket/run``, with retries and one-line errors.

The code relies only on what object stores guarantee: atomic writes of single objects, and read and list consistency
after a write. It does not rely on folders, renames or locks.
"""

from __future__ import annotations

import errno
import functools
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from toolkit.errors import UserError, causes_of, one_line
from toolkit.io.safe_parse import MAX_BYTES

P = ParamSpec("P")
T = TypeVar("T")

ATTEMPTS = 8
FIRST_DELAY, MAX_DELAY = 0.5, 30.0  # seconds between attempts, doubled up to the maximum
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "",
    "http": "aiohttp",
    "https": "aiohttp",
}
_jitter = random.SystemRandom()  # keeps the state of `random` unchanged for the run (S2)

_DENIED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "403", "401")
_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301")
_FULL = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "EntityTooLarge", "507")
_UNREACHABLE = (
    "EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError", "ConnectionRefusedError",
    "ConnectionClosedError", "ReadTimeoutError", "ServerDisconnectedError",
)  # fmt: skip


class StorageError(Exception):
    """A request failed after all retries. The one-line message has the reason and a fix, without secrets."""


def retry(request: Callable[[], T], url: str, attempts: int = ATTEMPTS, cancelled: threading.Event | None = None) -> T:
    """Run a request and return the result. Retry transient failures with exponential backoff and jitter.

    Args:
        request: Function to call on each attempt.
        url: URL of the object, for messages.
        attempts: Maximum number of attempts.
        cancelled: Event that stops further attempts.

    Raises:
        StorageError: The request failed permanently.
    """
    cancelled = cancelled or threading.Event()
    for attempt in range(attempts):
        try:
            return request()
        except Exception as error:
            reason, is_transient = describe(error, url)
            delay = min(MAX_DELAY, FIRST_DELAY * 2**attempt) * _jitter.uniform(0.5, 1)
            if not is_transient or attempt + 1 == attempts or cancelled.wait(delay):
                raise StorageError(reason) from error
    raise AssertionError


def _with_retries(method: Callable[Concatenate[Storage, P], T]) -> Callable[Concatenate[Storage, P], T]:
    """Decorate a method of :class:`Storage` to retry transient failures."""

    @functools.wraps(method)
    def call(self: Storage, *args: P.args, **options: P.kwargs) -> T:
        return retry(lambda: method(self, *args, **options), self.url, self.attempts, self.closed)

    return call


class Storage:
    """A folder on remote storage. Object names are relative to the folder, with slashes. Thread-safe.

    Methods retry requests, and raise :class:`StorageError` after a permanent failure.

    Args:
        url: URL of the folder.
        flag: Option that error messages name.
    """

    def __init__(self, url: str, flag: str) -> None:
        self.url, self.flag = url.rstrip("/"), flag
        self.fs = _connect(self.url, flag)
        self.root = str(self.fs._strip_protocol(self.url)).rstrip("/")
        self.has_folders = self.url.startswith(("file:", "memory:"))
        self.attempts = ATTEMPTS
        self.closed = threading.Event()  # stops further attempts

    def error(self, reason: object) -> UserError:
        return UserError(f"{self.flag} {self.url}: {reason}")

    # ---- objects

    @_with_retries
    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        """Return the bytes of an object from ``start`` to ``stop``. Return None if the object does not exist.

        Without ``stop``, a larger object than a log may be is an error.
        """
        limit = MAX_BYTES["log"]
        try:
            content = self.fs.cat_file(self._path(name), start=start, end=limit + 1 if stop is None else stop)
            if stop is None and len(content) > limit:
                raise self.error(f"{name} has more than {limit:,} bytes; move it away")
            return content
        except FileNotFoundError as error:
            return _missing(error, None)
        except OSError as error:
            if _response_code(error)[0] != "InvalidRange":
                raise
            return b""  # the range starts after the end of the object

    @_with_retries
    def write(self, name: str, content: bytes) -> None:
        """Write an object and check its size."""
        self._make_parent(name)
        self.fs.pipe_file(self._path(name), content)
        self._require_size(name, len(content))

    def upload(self, file: Path, name: str) -> None:
        """Upload a file, in parts if it is large, and check its size.

        Raises:
            OSError: The file cannot be read.
        """
        self._put(file, name, file.stat().st_size)

    @_with_retries
    def _put(self, file: Path, name: str, size: int) -> None:
        self._make_parent(name)
        self.fs.put_file(str(file), self._path(name))
        self._require_size(name, size)

    @_with_retries
    def copy(self, source: str, target: str) -> None:
        """Copy an object on the server side, without a download."""
        self._make_parent(target)
        self.fs.cp_file(self._path(source), self._path(target))
        self._require_size(target, self.fs.info(self._path(source))["size"])

    @_with_retries
    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        try:
            self.fs.rm_file(self._path(name))
        except FileNotFoundError as error:
            _missing(error, None)

    @_with_retries
    def exists(self, name: str) -> bool:
        """Whether an object exists."""
        try:
            return self.fs.info(self._path(name))["type"] == "file"
        except FileNotFoundError:
            return False

    # ---- folders

    @_with_retries
    def entries(self, folder: str = "") -> dict[str, bool]:
        """Return {name: is_folder} for the entries of a folder, or {} if the folder does not exist."""
        try:
            entries = self.fs.ls(self._path(folder), detail=True)
        except FileNotFoundError as error:
            return _missing(error, {})
        by_name = {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in entries}
        return {name: entry["type"] == "directory" for name, entry in sorted(by_name.items()) if name}

    def files(self, folder: str) -> Iterator[str]:
        """Yield the names of all objects below a folder, relative to the folder."""
        for name, is_folder in self.entries(folder).items():
            if is_folder:
                yield from (f"{name}/{inner}" for inner in self.files(f"{folder}/{name}".lstrip("/")))
            else:
                yield name

    def delete_empty(self, folder: str) -> None:
        """Delete a folder that has no objects, on storage with real folders."""
        if self.has_folders:
            with suppress(FileNotFoundError):
                self.fs.rm(self._path(folder), recursive=True)

    def probe(self) -> None:
        """Check that a small object can be written, read, listed and deleted."""
        name, content = f".probe-{secrets.token_hex(4)}", b"written by toolkit to see whether this is possible\n"
        attempts, self.attempts = self.attempts, 4
        try:
            self.write(name, content)
            if self.read(name) != content or name not in self.entries():
                raise self.error("returned old content after a write; use storage with read-after-write consistency")
            self.delete(name)
        except StorageError as error:
            raise self.error(error) from error
        finally:
            self.attempts = attempts

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _make_parent(self, name: str) -> None:
        if self.has_folders:
            self.fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _require_size(self, name: str, size: int) -> None:
        written = self.fs.info(self._path(name))["size"]
        if written != size:
            raise ConnectionError(f"only {written:,} of {size:,} bytes of {name} were stored")


def _missing(error: FileNotFoundError, value: T) -> T:
    """Return ``value`` for a missing object. Raise ``error`` for a missing bucket."""
    if _response_code(error)[0] == "NoSuchBucket":
        raise error
    return value


def _connect(url: str, flag: str) -> Any:
    """Create an fsspec file system for the URL, without instance and listing caches."""
    scheme = url.partition("://")[0].lower()
    package = PACKAGES.get(scheme)
    try:
        import fsspec

        if scheme.startswith("http"):
            raise ValueError("it cannot be listed")
        cls = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        install = f"pip install {package}" if package else "pip install the package for it"
        raise UserError(f"{flag} {url}: {scheme}:// needs a package that is not installed; run: {install}") from error
    except ValueError as error:
        raise UserError(
            f"{flag} {url}: runs cannot be stored on {scheme}://; use storage that fsspec supports, such as s3:// or gs://"
        ) from error
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if package == "s3fs":
        # s3fs retries requests, including parts of large files. Disable botocore's retries; they draw from `random`.
        from s3fs.core import set_custom_error_handler

        set_custom_error_handler(lambda error: _response_code(error)[1] >= 500 and _response_code(error)[1] != 507)
        options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}
    try:
        fs = cls(**options)
    except Exception as error:  # gcsfs connects here
        raise UserError(f"{flag} {url}: {describe(error, url)[0]}") from error
    if (loop := getattr(fs, "loop", None)) is not None:
        loop.set_exception_handler(_report_unhandled)
    return fs


def _report_unhandled(loop: Any, context: dict[str, Any]) -> None:
    """Report an error that nothing awaits, except of a lost connection: aiohttp drops the task that writes the body."""
    if not isinstance(context.get("exception"), ConnectionError):  # the request fails too, and is repeated
        loop.default_exception_handler(context)


def describe(error: BaseException, url: str) -> tuple[str, bool]:
    """Return a one-line reason with a fix, without credentials, and whether a retry may succeed.

    ``url`` is the requested URL or local path.
    """
    scheme, is_remote, _ = url.partition("://")
    chain, (code, status) = list(causes_of(error)), _response_code(error)
    names = {type(e).__name__ for e in chain}
    if isinstance(error, ImportError):
        install = f"run: pip install {PACKAGES[scheme]}" if PACKAGES.get(scheme) else "install the package for it"
        return f"{scheme}:// needs a package that is not installed; {install}", False
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        return "unknown kind of storage; use a local path, s3://, gs://, hf:// or https://", False
    if names & set(_UNREACHABLE):
        return (
            f"the storage does not respond; check the network{' and AWS_ENDPOINT_URL' * scheme.startswith('s3')}",
            True,
        )
    if code == "NoSuchBucket" or (status == 404 and "Bucket" in code):
        return "no such bucket; create it, or check its name and AWS_ENDPOINT_URL", False
    if isinstance(error, FileNotFoundError):
        return "no such file, folder or bucket; check the name", False
    if not is_remote:
        fix = "; check its permissions" if isinstance(error, PermissionError) else ""
        reason = getattr(error, "strerror", None) or one_line(error) or type(error).__name__
        return f"cannot be read: {reason[:200]}{fix}", not isinstance(error, FileNotFoundError | PermissionError)
    if name := next((name for name in names if name == "ProfileNotFound" or "Credential" in name), None):
        return (
            f"no credentials ({name}); set the storage's in the environment, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or name a profile with AWS_PROFILE"
        ), False
    if code in _FULL or status == 507 or any(getattr(e, "errno", 0) in (errno.ENOSPC, errno.EDQUOT) for e in chain):
        return f"the storage is full ({code or 'no space left'}); free some space or raise its quota", False
    if code in _REGION:
        return f"the bucket is in another region ({code}); set AWS_DEFAULT_REGION to its region", False
    if code in _DENIED or status in (401, 403) or "PermissionError" in names:
        return (
            f"access denied ({code or 'no permission'}); check the key, and that it may list, read, write and delete "
            "there"
        ), False
    if code == "InvalidBucketName" or "ParamValidationError" in names:
        return "invalid bucket name; check it", False
    reason = code if code and not code.isdigit() else one_line(error)[:150] or type(error).__name__
    return f"the storage failed ({reason}{f', HTTP status {status}' if status else ''}); try again later", True


def _response_code(error: BaseException) -> tuple[str, int]:
    """Return the error code and HTTP status of a storage response, or ("", 0) if there is none."""
    for cause in causes_of(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), int(status or 0)
        if isinstance(getattr(cause, "code", None), int):  # gcsfs
            return str(cause.code), int(cause.code)  # type: ignore[attr-defined]
    return "", 0
