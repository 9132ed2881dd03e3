"""Access a folder on remote storage, such as ``s3://bucket/run``, with one-line errors.

The code relies only on what object stores guarantee: atomic writes of single objects, and read and list consistency
after a write. It does not rely on folders, renames or locks. fsspec's file systems repeat requests that fail.
"""

import errno
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from toolkit.errors import UserError, causes_of, one_line
from toolkit.io.safe_parse import MAX_BYTES

T = TypeVar("T")

RETRY_DELAYS = (0.5, 1, 2, 4, 8, 16, 30)  # seconds between attempts to read a file
ATTEMPTS = 10  # of s3fs, over half a minute
PROBE_ATTEMPTS = 5  # over a second
# (what an error code, HTTP status, errno or exception name contains, what is wrong, the fix). The first match counts.
_REASONS = (
    ("NoSuchBucket", "no such bucket", "create it, or check its name and AWS_ENDPOINT_URL"),
    ("ImportError|ModuleNotFound", "needs a package that is not installed", "install it with pip"),
    (
        "Credential|ProfileNotFound",
        "no credentials",
        "set the storage's in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile "
        "with AWS_PROFILE",
    ),
    (
        "Quota|EDQUOT|ENOSPC|StorageFull|InsufficientStorage|TooLarge|507",
        "the storage is full",
        "free some space or raise its quota",
    ),
    (
        "Redirect|AuthorizationHeader|IllegalLocation|301",
        "the bucket is in another region",
        "set AWS_DEFAULT_REGION to its region",
    ),
    (
        "Denied|InvalidAccessKey|SignatureDoesNotMatch|Token|401|403|Permission",
        "access denied",
        "check the key, and that it may list and read there, and for --out_dir also write and delete",
    ),
    ("BucketName|ParamValidation", "invalid bucket name", "check it"),
    (
        "Endpoint|Connect|Disconnect|Timeout",
        "the storage does not respond",
        "check the network, and AWS_ENDPOINT_URL for s3://",
    ),
    ("FileNotFound", "no such file, folder or bucket", "check the name"),
)


class StorageError(Exception):
    """A request failed after all attempts. The one-line message has the reason and a fix, without secrets."""


@contextmanager
def _request() -> Iterator[None]:
    """Raise failures as :class:`StorageError`. Decorates the methods of :class:`Storage`."""
    try:
        yield
    except (StorageError, UserError):
        raise
    except Exception as error:  # each file system has its own
        raise StorageError(describe(error)) from error


class Storage:
    """A folder on remote storage. Object names are relative to the folder, with slashes. Thread-safe.

    Methods raise :class:`StorageError` after a failure.

    Args:
        url: URL of the folder.
        flag: Option that error messages name.
    """

    def __init__(self, url: str, flag: str) -> None:
        self.url, self.flag = url.rstrip("/"), flag
        self.fs = _connect(self.url, flag)
        self.root = str(self.fs._strip_protocol(self.url)).rstrip("/")
        self.fs.retries = ATTEMPTS  # of s3fs; the others have their own
        self.fs.auto_mkdir = True  # of file://

    def error(self, reason: object) -> UserError:
        return UserError(f"{self.flag} {self.url}: {reason}")

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Raise :class:`StorageError` as :meth:`error`."""
        try:
            yield
        except StorageError as error:
            raise self.error(error) from error

    # ---- objects

    @_request()
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
            _require_bucket(error)
            return None
        except OSError as error:
            if _response_code(error)[0] != "InvalidRange":
                raise
            return b""  # the range starts after the end of the object

    @_request()
    def write(self, name: str, content: bytes) -> None:
        """Write an object."""
        self.fs.pipe_file(self._path(name), content)

    @_request()
    def upload(self, file: Path, name: str) -> None:
        """Upload a file, in parts if it is large, and check its size."""
        self.fs.put_file(str(file), self._path(name))
        if (size := self.fs.info(self._path(name))["size"]) != file.stat().st_size:
            raise StorageError(f"only {size:,} of {file.stat().st_size:,} bytes of {name} were stored; try again")

    @_request()
    def copy(self, source: str, target: str) -> None:
        """Copy an object on the server side, without a download."""
        self.fs.cp_file(self._path(source), self._path(target))

    @_request()
    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    @_request()
    def exists(self, name: str) -> bool:
        """Whether an object exists."""
        try:
            return self.fs.info(self._path(name))["type"] == "file"
        except FileNotFoundError:
            return False

    # ---- folders

    @_request()
    def entries(self) -> dict[str, bool]:
        """Return {name: is_folder} for the entries of the folder, or {} if it does not exist."""
        try:
            entries = self.fs.ls(self.root, detail=True)
        except FileNotFoundError as error:
            _require_bucket(error)
            return {}
        kinds = {PurePosixPath(entry["name"]).name: entry["type"] for entry in entries}
        return {name: kind == "directory" for name, kind in sorted(kinds.items()) if name}

    @_request()
    def files(self, folder: str) -> dict[str, int]:
        """Return {name: bytes} of all objects below a folder, with names relative to the folder."""
        entries = self.fs.find(self._path(folder), detail=True).items()
        return {path.removeprefix(f"{self._path(folder)}/"): entry["size"] for path, entry in entries}

    @_request()
    def delete_folder(self, folder: str) -> None:
        """Delete all objects below a folder, if there are any."""
        with suppress(FileNotFoundError):
            self.fs.rm(self._path(folder), recursive=True)

    def probe(self) -> None:
        """Check that a small object can be written, read, listed and deleted."""
        name, content = f".probe-{secrets.token_hex(4)}", b"written by toolkit to see whether this is possible\n"
        self.fs.retries = PROBE_ATTEMPTS
        with self.one_line_errors():
            self.write(name, content)
            is_consistent = self.read(name) == content and name in self.entries()
            self.delete(name)
        if not is_consistent:
            raise self.error("returned old content after a write; use storage with read-after-write consistency")
        self.fs.retries = ATTEMPTS

    def _path(self, name: str) -> str:
        return f"{self.root}/{name.strip('/')}".rstrip("/")


def _require_bucket(error: FileNotFoundError) -> None:
    """Raise ``error`` if not only the object or folder, but its bucket is missing."""
    if _response_code(error)[0] == "NoSuchBucket":
        raise error


def _connect(url: str, flag: str) -> Any:
    """Create an fsspec file system for the URL, without instance and listing caches."""
    scheme = url.partition("://")[0].lower()
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme.startswith("http"):
        raise UserError(f"{flag} {url}: runs cannot be stored on {scheme}://, which has no folders; use s3:// or gs://")
    try:
        import fsspec

        cls = fsspec.get_filesystem_class(scheme)
        if scheme in ("s3", "s3a"):
            from s3fs.core import set_custom_error_handler

            set_custom_error_handler(_is_transient)
            # s3fs repeats requests. Botocore would draw its delays from `random`, whose state belongs to the run (S2).
            options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}
        fs = cls(**options)
    except Exception as error:  # gcsfs connects here
        raise UserError(f"{flag} {url}: {describe(error)}") from error
    if (loop := getattr(fs, "loop", None)) is not None:
        loop.set_exception_handler(_report_unhandled)
    return fs


def _is_transient(error: Exception) -> bool:
    """Whether s3fs also repeats a request after this error: no connection was made, or HTTP 5xx."""
    from botocore.exceptions import ConnectionError

    status = _response_code(error)[1] if hasattr(error, "response") else 0  # not of a cause: its attempts are over
    return isinstance(error, ConnectionError) or (status >= 500 and status != 507)


def _report_unhandled(loop: Any, context: dict[str, Any]) -> None:
    """Report an error that nothing awaits, except of a lost connection: aiohttp drops the task that writes the body."""
    if not isinstance(context.get("exception"), ConnectionError):  # the request fails too, and is repeated
        loop.default_exception_handler(context)


def describe(error: Exception, is_local: bool = False) -> str:
    """Return a one-line reason with a fix, without credentials."""
    if is_local and isinstance(error, FileNotFoundError):
        return "no such file or folder; check the path"
    if is_local:
        reason = one_line(getattr(error, "strerror", None) or error) or type(error).__name__
        return f"cannot be read: {reason[:200]}; check the path and its permissions"
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        return "unknown kind of storage; use a local path, s3://, gs://, hf:// or https://"
    code, status = _response_code(error)
    number = errno.errorcode.get(getattr(error, "errno", None) or 0, "")  # of file://
    words = (code, str(status), number, *(type(cause).__name__ for cause in causes_of(error)))
    for pattern, reason, fix in _REASONS:
        if word := next((word for word in words if re.search(pattern, word)), ""):
            return f"{reason} ({one_line(error)[:150] if isinstance(error, ImportError) else word}); {fix}"
    reason = code if code and not code.isdigit() else one_line(error)[:150] or type(error).__name__
    return f"the storage failed ({reason}{f', HTTP status {status}' if status else ''}); try again later"


def is_url(value: str) -> bool:
    """Whether fsspec reads a value as a URL, also a chained one."""
    return "://" in value


def open_storage(value: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path in it."""
    import fsspec

    return fsspec.core.url_to_fs(value if is_url(value) else str(Path(value).expanduser().absolute()))


@contextmanager
def storage_errors(where: str, url: str) -> Iterator[None]:
    """Translate storage errors into a one-line UserError that starts with ``where``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each file system has its own
        raise UserError(f"{where}: {describe(error, not is_url(url))}") from error


def with_retries(read: Callable[[], T], name: str, is_local: bool = False, reraised: Collection[int] = ()) -> T:
    """Return ``read()``. Repeat it after an error that may pass.

    Args:
        name: What is read, for the message.
        is_local: Whether it is a local file.
        reraised: Error numbers of the disk that ``read`` writes to; these errors are raised as they are.

    Raises:
        StorageError: Something is missing or denied, or all attempts failed.
    """
    for delay in (*RETRY_DELAYS, None):
        try:
            return read()
        except Exception as error:  # each library has its own
            if isinstance(error, StorageError) or getattr(error, "errno", None) in reraised:
                raise
            is_denied = isinstance(error, FileNotFoundError | PermissionError | ImportError)
            if delay is None or is_denied or _response_code(error)[1] in (401, 403, 404):
                raise StorageError(f"{name}: {describe(error, is_local)}") from error
            time.sleep(delay)
    raise AssertionError  # unreachable: the last attempt returns or raises


def _response_code(error: BaseException) -> tuple[str, int]:
    """Return the error code and HTTP status of a storage response, or ("", 0) if there is none."""
    for cause in causes_of(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return response.get("Error", {}).get("Code", ""), response.get("ResponseMetadata", {}).get(
                "HTTPStatusCode", 0
            )
        if isinstance(code := getattr(cause, "code", None), int):  # gcsfs
            return str(code), code
    return "", 0
