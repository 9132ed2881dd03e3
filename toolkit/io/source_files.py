"""Source files, local or on any fsspec file system. They are listed once and read with retries."""

import glob
import hashlib
import io
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from toolkit.errors import UserError, join_first
from toolkit.io.storage import StorageError, is_url, open_storage, storage_errors, with_retries

# Format of each suffix. One of COMPRESSIONS may follow, except after .parquet.
FORMATS = {
    ".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".text": "text",
    ".md": "text",
}  # fmt: skip
COMPRESSIONS = (".gz", ".zst")
SUPPORTED = ".parquet, .jsonl or .txt, the last two also with .gz or .zst"

_SAMPLED_FILES, _SAMPLE = 32, 1 << 16  # local files sampled for the listing hash; bytes per sample
_USER = re.compile(r"://[^/?#]*@")  # anywhere, as fsspec URLs may be chained: simplecache::https://...
_QUERY = re.compile(r"(?i)[?&#](?!(download|dl|raw|inline|ref|format|version|versionid)=)[^=&#/]*=")  # not in globs


@dataclass(frozen=True)
class SourceFile:
    """One file to read.

    Args:
        url: URL for fsspec, or the path of a local file.
        name: Path relative to the listed folder, for the cache key and messages.
        size: Size in bytes.
        version: Checksum or version from the storage listing, or an empty string.
    """

    url: str
    name: str
    size: int
    version: str = ""

    @property
    def kind(self) -> str:
        """Return "parquet", "jsonl" or "text"."""
        return FORMATS[_suffixes(self.name)[0]]

    @property
    def compression(self) -> str:
        """Return ".gz", ".zst" or an empty string."""
        return _suffixes(self.name)[1]


SourceFiles = list[SourceFile]


def _suffixes(name: str) -> tuple[str, str]:
    """Return the format and compression suffixes in lower case. Both are empty for unsupported formats."""
    name = name.lower()
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")
    suffix = Path(name.removesuffix(compression)).suffix
    if suffix not in FORMATS or (suffix == ".parquet" and compression):
        return "", ""
    return suffix, compression


def is_supported(name: str) -> bool:
    return _suffixes(name)[0] != ""


def require_no_secret(value: str, option: str) -> None:
    """Raise UserError for a URL that may have credentials; they would be saved with the run's options."""
    if _USER.search(value) or (is_url(value) and _QUERY.search(value)):
        scheme = value.partition("://")[0]
        raise UserError(
            f"--data.{option} {scheme}://...: contains credentials or a query, which would be saved with the run; give "
            "credentials in the environment, or download the file"
        )


def list_path(value: str, option: str) -> SourceFiles:
    """List the text, JSON Lines and Parquet files of a path, see :func:`find_files`."""
    where = f"--data.{option} {value}"
    no_files = f"the folder has no file of a supported format: {SUPPORTED}"
    return require_text(find_files(value, where, is_supported, no_files), where)


def find_files(
    value: str, where: str, is_wanted: Callable[[str], bool] = bool, no_files: str = "the folder has no files"
) -> SourceFiles:
    """List the files of a path, folder or glob, local or remote, sorted by name.

    Args:
        where: Option and value that error messages name.
        is_wanted: Whether to list a file of a folder, by its name. Hidden files are only listed if the path names them.
        no_files: The problem with a folder without files.
    """
    with storage_errors(where, value):
        fs, path = open_storage(value)
        if glob.has_magic(path) and not fs.exists(path):
            root, problem = re.split(r"[*?\[]", path)[0].rpartition("/")[0], "no file matches; check the pattern"
            infos = fs.glob(path, detail=True)
        elif fs.isdir(path):
            root, problem = path.rstrip("/"), no_files
            infos = {k: v for k, v in fs.find(path, detail=True).items() if is_wanted(k)}
        else:
            root, infos, problem = path.rpartition("/")[0], {path: fs.info(path)}, "not a regular file"
        names_hidden = "/." in path[len(root) :]
        is_visible = {name: names_hidden or "/." not in name[len(root) :] for name in infos}
        infos = {name: info for name, info in infos.items() if info["type"] == "file" and is_visible[name]}
    if not infos:
        raise UserError(f"{where}: {problem}")
    return [_describe(fs, name, info, root) for name, info in sorted(infos.items())]


def require_text(files: SourceFiles, where: str) -> SourceFiles:
    """Return the non-empty files. Raise UserError for an unsupported format or if all files are empty."""
    for file in files:
        if not is_supported(file.name):
            raise UserError(f"{where}: {file.name.rpartition('/')[2]}: must end in {SUPPORTED}")
    if not (non_empty := [file for file in files if file.size]):
        names = join_first([file.name for file in files], 3)
        raise UserError(f"{where}: contains no text ({names}: 0 bytes); use other files")
    return non_empty


def _describe(fs: Any, path: str, info: dict[str, Any], root: str) -> SourceFile:
    is_local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
    version = next((str(info[key]) for key in ("ETag", "etag", "crc32c", "md5Hash", "sha256") if info.get(key)), "")
    name = path.removeprefix(root).lstrip("/")
    return SourceFile(path if is_local else fs.unstrip_protocol(path), name, int(info.get("size") or 0), version)


def listing_hash(files: SourceFiles) -> str:
    """Return a hex SHA-256 of the listing: names, sizes and versions.

    Local files have no version. Instead, the first and last 64 KiB of up to 32 evenly spaced files are hashed. Folder
    paths and modification times are ignored. A change elsewhere that keeps the size is not detected.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0{file.version}\n".encode())
    local = [file for file in files if not is_url(file.url)]
    for i in sorted(
        {round(i * (len(local) - 1) / (_SAMPLED_FILES - 1)) for i in range(_SAMPLED_FILES)} if local else []
    ):
        with open(local[i].url, "rb") as opened:
            digest.update(opened.read(_SAMPLE))
            opened.seek(max(0, local[i].size - _SAMPLE))
            digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()


class RetryingFile(io.RawIOBase):
    """A read-only, seekable file. Failed reads are retried on a new connection.

    Raises:
        StorageError: The storage denies access, all attempts failed, or the file is shorter than listed.
    """

    def __init__(self, file: SourceFile) -> None:
        self._source, self._position = file, 0
        self._opened: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        n_bytes = min(len(buffer), self._source.size - self._position)
        if n_bytes <= 0:
            return 0
        content = self._read(n_bytes)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _read(self, size: int) -> bytes:
        def read() -> bytes:
            try:
                if self._opened is None:
                    self._opened = _open(self._source)
                self._opened.seek(self._position)
                return self._opened.read(size)
            except Exception:
                self._disconnect()
                raise

        if content := with_retries(read, self._source.name, not is_url(self._source.url)):
            return content
        raise StorageError(
            f"{self._source.name}: has become shorter since the run read its size; restore the file as it was, or "
            "start a new run with another --out_dir"
        )

    def _disconnect(self) -> None:
        if self._opened is not None:
            with suppress(Exception):
                self._opened.close()
        self._opened = None


def _open(file: SourceFile) -> IO[bytes]:
    if not is_url(file.url):
        return open(file.url, "rb", buffering=0)
    fs, path = open_storage(file.url)
    # The size is known. Disable fsspec's cache: the readers have their own buffers.
    return fs.open(path, "rb", size=file.size, cache_type="none")
