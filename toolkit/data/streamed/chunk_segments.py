"""Chunks of a LitData dataset as the segments of a stream. Each is downloaded with litdata, and verified."""

import errno
import zlib
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from toolkit.data.base import Report, Values
from toolkit.data.cache import CRC_FILE, hash_inputs
from toolkit.data.streamed.source import SegmentCounts, Source
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.chunks import INDEX, PIECE, ChunkedArray, ChunkIndex
from toolkit.data.tokens.token_store import TOKENS
from toolkit.errors import DataError
from toolkit.io.storage import StorageError, is_url, open_storage, with_retries

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_SCHEMES = ("s3://", "gs://", "hf://", "azure://", "r2://")  # with a downloader in litdata


class ChunkSegments(Source):
    """The chunks of one or more folders, one after the other. A segment is a chunk.

    Args:
        indexes: Folder of the subfolders 0, 1, ... with the index of each URL.
        urls: Folders of the chunks: URLs, or local folders of compressed chunks.
    """

    noun = "chunk"

    def __init__(self, indexes: Path, urls: list[str]) -> None:
        self.urls, self.origin = urls, f"{hash_inputs(urls)[:8]}-"
        self.indexes = [ChunkIndex(indexes / str(i)) for i in range(len(urls))]

    @cached_property
    def segments(self) -> list[tuple[int, int]]:
        """The folder and the chunk of each segment."""
        return [(folder, chunk) for folder, index in enumerate(self.indexes) for chunk in range(len(index.sizes))]

    @property
    def sizes(self) -> list[int]:
        """The number of tokens of each segment."""
        return list(chain.from_iterable(index.sizes for index in self.indexes))

    @property
    def is_verified(self) -> bool:
        """Whether all chunks have checksums from where they were written."""
        return all(index.checksums is not None for index in self.indexes)

    def expected_bytes(self, number: int) -> int:
        folder, chunk = self.segments[number]
        return self.indexes[folder].chunk_bytes(chunk)

    def names(self, number: int) -> list[str]:
        folder, chunk = self.segments[number]
        return [f"{self.urls[folder]}/{self.indexes[folder].files[chunk]}"]

    def write(self, number: int, folder: Path, tokenizer: Tokenizer | None, report: Report) -> SegmentCounts:
        where, chunk = self.segments[number]
        index, tokens, (source,) = self.indexes[where], folder / TOKENS, self.names(number)
        tokens.mkdir()
        path, is_copied = tokens / index.files[chunk], is_url(source) or not index.compression
        if is_copied:
            _download(source, path)
        if index.compression:
            _decompress(path if is_copied else Path(source), path, index.chunk_bytes(chunk))
        if (size := path.stat().st_size) != (expected := index.chunk_bytes(chunk)):
            reason = f"has {size:,} bytes, but {INDEX} says {expected:,}; write or upload the data again"
            raise StorageError(f"{source}: {reason}")
        index.write_single(chunk, tokens)
        array = ChunkedArray(tokens)
        try:  # verify the checksums; without them write some, so that later damage in the cache is noticed
            crcs = [zlib.crc32(array.read(i, min(i + PIECE, len(array))).data) for i in range(0, len(array), PIECE)]
        except DataError as error:
            raise StorageError(f"{source}: is damaged (checksum mismatch); upload it again") from error
        if array.checksums is None:
            np.save(tokens / CRC_FILE, np.asarray(crcs, np.uint32))
        return SegmentCounts(len(array), 0, size, {})

    def to_json(self) -> Values:
        return {"urls": self.urls}


def _download(url: str, path: Path) -> None:
    """Download a file with litdata, or with fsspec where it has no downloader."""

    def download() -> None:
        try:
            if url.startswith(_SCHEMES):
                from litdata.streaming import downloader  # takes two seconds: only the worker imports it

                # without this, litdata 0.2.76 refuses endpoints of http://, such as MinIO's
                getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", {}).setdefault("allow_http", "true")
                # litdata suppresses FileNotFoundError
                downloader.get_downloader(url.rpartition("/")[0], str(path.parent), []).download_file(url, str(path))
            else:
                fs, remote = open_storage(url)
                fs.get_file(remote, str(path))
            if not path.is_file():
                raise FileNotFoundError(url)
        except FileNotFoundError as error:
            raise _missing(url) from error

    with_retries(download, url, reraised=_DISK_ERRORS)
    for lock in path.parent.glob("*.lock"):  # of litdata
        lock.unlink()


def _decompress(source: Path, target: Path, size: int) -> None:
    """Decompress a chunk. Stop beyond the ``size`` in bytes that it must have."""
    import pyarrow

    temporary = target.with_name("decompressed")
    try:
        with pyarrow.input_stream(str(source), compression="zstd") as packed, open(temporary, "wb") as file:
            while file.tell() <= size and (block := packed.read(1 << 24)):
                file.write(block)
    except FileNotFoundError as error:
        raise _missing(str(source)) from error
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            raise
        raise StorageError(f"{source.name}: is damaged (not zstd); write or upload it again") from error
    temporary.rename(target)


def _missing(source: str) -> StorageError:
    return StorageError(f"{source}: is missing, but {INDEX} lists it; upload it again")
