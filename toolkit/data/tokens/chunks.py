"""Random access to token arrays in LitData's flat chunk format.

``StreamingDataset`` reads the same files, but checks for updates over the network, divides its length by the number of
ranks, and is at least twice as slow for random access.
"""

import bisect
import contextlib
import hashlib
import json
import os
import re
import weakref
import zlib
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np

from toolkit.data.base import State, Values
from toolkit.data.cache import CRC_FILE
from toolkit.errors import DataError, one_line
from toolkit.io.safe_parse import read_json

INDEX = "index.json"
PIECE = 1 << 16  # values per checksum; 128 KiB of uint16, the default read-ahead of Linux
_OPEN_CHUNKS = 256  # open files of all arrays in a process; the usual limit is 1,024 descriptors
_STAT_CHUNKS = 1024  # with more chunks, sizes are checked on reading; survey() samples this many
_READ_ALL_BYTES = 1 << 30  # above this, survey() samples
_SAMPLES, _SAMPLE = 16, 1 << 14  # samples per chunk, tokens per sample
_BLOCK = 1 << 22  # values read at once
# LitData's codes for integer types, copied because litdata.constants imports torch.
_TENSOR_TYPES = {
    11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64", 20: "uint16",
}  # fmt: skip
_NUMPY_TYPES = dict(enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_TYPES = {"no_header_tensor": _TENSOR_TYPES, "no_header_numpy": _NUMPY_TYPES}


class ChunkIndex:
    """The index of a folder of token chunks, with the checksums if :class:`TokenWriter` wrote it.

    Args:
        folder: Contains ``index.json``, and ``crc32.npy`` if there are checksums. The chunks may be elsewhere.

    Attributes:
        dtype: Data type of the tokens.
        files: File name of each chunk.
        headers: Bytes before the tokens of each chunk.
        sizes: Number of tokens of each chunk.
        compression: ``zstd`` or ``zstd:LEVEL`` if each chunk is compressed as a whole, else None.

    Raises:
        ValueError: The index is invalid, or names a file outside the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = read_index(self.folder)
        self.dtype, self.compression = _parse_dtype(index["config"]), index["config"].get("compression")
        self.files = [_parse_chunk_name(chunk) for chunk in index["chunks"]]
        # A chunk starts with a uint32 header: the number of items, then n + 1 item offsets.
        self.headers = [4 * (chunk["chunk_size"] + 2) for chunk in index["chunks"]]
        self.sizes: list[int] = [chunk["dim"] for chunk in index["chunks"]]
        self._pieces = [0, *accumulate(-(-size // PIECE) for size in self.sizes)]

    def chunk_bytes(self, chunk: int) -> int:
        """Return the size of an uncompressed chunk in bytes."""
        return self.headers[chunk] + self.sizes[chunk] * self.dtype.itemsize

    def write_single(self, chunk: int, folder: Path) -> None:
        """Write the index of one chunk alone, without compression, and its checksums."""
        index = read_index(self.folder)
        single = {"chunks": [index["chunks"][chunk]], "config": index["config"] | {"compression": None}}
        (folder / INDEX).write_text(json.dumps(single), encoding="utf-8")
        if self.checksums is not None:
            np.save(folder / CRC_FILE, self.checksums[self._pieces[chunk] : self._pieces[chunk + 1]])

    @cached_property
    def checksums(self) -> np.ndarray | None:
        """CRC-32 of each piece of 65,536 values of each chunk, or None."""
        if not (self.folder / CRC_FILE).is_file():
            return None
        try:
            checksums = np.load(self.folder / CRC_FILE, mmap_mode="r")
        except Exception as error:  # numpy parses the header as Python code, and can raise tokenize's errors
            raise ValueError(f"{self.folder / CRC_FILE} is damaged: {one_line(error)}") from error
        if checksums.dtype != np.uint32 or checksums.shape != (self._pieces[-1],):
            raise ValueError(f"{self.folder / CRC_FILE} does not belong to these chunks")
        return checksums


class ChunkedArray(ChunkIndex):
    """A 1-D integer array in chunk files. Opening reads no chunk, and stats the chunks only if there are at most 1,024.

    Chunks are read with ``pread``. With mmap, a chunk truncated during a run would cause SIGBUS, and mapped pages would
    count as process memory. Thread-safe and picklable.

    Args:
        folder: Contains ``index.json`` and the listed chunks, and ``crc32.npy`` if :class:`TokenWriter` wrote it. With
            checksums, each piece of 65,536 values is verified on first use (S7).

    Raises:
        ValueError: The index is invalid or names a file outside the folder, or a chunk is missing. With at most 1,024
            chunks, also if a chunk is truncated.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        if self.compression:
            raise ValueError(f"{self.folder} has compressed chunks")
        self._starts = [0, *accumulate(self.sizes)]
        self._check_files()  # a missing chunk before wrong checksums
        self._reset_files()

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the values in [start, stop), shape (stop - start,). The range may span chunks.

        Raises:
            DataError: A chunk is missing, damaged or cannot be read.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"values {start} to {stop} of {len(self)}")
        parts = [np.empty(0, self.dtype)]
        chunk = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end, begin = min(stop, self._starts[chunk + 1]), self._starts[chunk]
            if self.checksums is not None:
                self._verify(chunk, start - begin, end - begin, self.checksums)
            parts.append(self._read(chunk, start - begin, end - begin))
            start, chunk = end, chunk + 1
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yield the values in [start, stop) in large blocks."""
        stop = len(self) if stop is None else stop
        for begin in range(start, stop, _BLOCK):
            yield self.read(begin, min(begin + _BLOCK, stop))

    def survey(self) -> tuple[bytes, int]:
        """Scan the values once.

        Up to 1 GiB, every value is read. Larger data is sampled: 16 evenly spaced blocks of 16 Ki values per chunk, in
        at most 1,024 evenly spaced chunks. Changes in between are not detected.

        Returns:
            SHA-256 of the index and the values, and the largest value.
        """
        digest, largest = hashlib.sha256((self.folder / INDEX).read_bytes()), 0
        for values in self._samples():
            digest.update(values.data)
            largest = max(largest, int(values.max()))
        return digest.digest(), largest

    def _samples(self) -> Iterator[np.ndarray]:
        """Yield the non-empty blocks that :meth:`survey` reads."""
        if len(self) * self.dtype.itemsize <= _READ_ALL_BYTES:
            yield from self.blocks()
            return
        last = len(self.sizes) - 1
        for chunk in sorted({i * last // (_STAT_CHUNKS - 1) for i in range(_STAT_CHUNKS)}):
            begin, end = self._starts[chunk : chunk + 2]
            if end - begin <= _SAMPLES * _SAMPLE:
                yield from self.blocks(begin, end)
                continue
            for sample in (begin + i * (end - begin - _SAMPLE) // (_SAMPLES - 1) for i in range(_SAMPLES)):
                yield self.read(sample, sample + _SAMPLE)

    def __getstate__(self) -> State:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_verified")}

    def __setstate__(self, state: State) -> None:
        self.__dict__.update(state)
        self._reset_files()

    def _reset_files(self) -> None:
        """Reset the open files and verified pieces, on creation and after unpickling."""
        self._open: dict[int, IO[bytes]] = {}
        self._verified = bytearray(0 if self.checksums is None else len(self.checksums))
        _arrays.add(self)

    def _verify(self, chunk: int, start: int, stop: int, checksums: np.ndarray) -> None:
        """Verify the pieces of a chunk that cover [start, stop), unless already verified."""
        for begin in range(start // PIECE * PIECE, stop, PIECE):
            piece = self._pieces[chunk] + begin // PIECE
            if not self._verified[piece]:
                values = self._read(chunk, begin, min(begin + PIECE, self.sizes[chunk]))
                if zlib.crc32(values.data) != checksums[piece]:
                    raise self._error(chunk, f"checksum mismatch (after token {begin:,})")
                self._verified[piece] = True

    def _read(self, chunk: int, start: int, stop: int) -> np.ndarray:
        n_bytes = (stop - start) * self.dtype.itemsize
        try:
            file = self._open.get(chunk) or self._open_chunk(chunk)
            content = os.pread(file.fileno(), n_bytes, self.headers[chunk] + start * self.dtype.itemsize)
        except OSError as error:
            raise self._error(chunk, f"cannot be read: {error.strerror or error}") from error
        if len(content) != n_bytes:
            raise self._error(chunk, "is truncated")
        values = np.frombuffer(content, self.dtype)
        if self.dtype.kind == "i" and values.size and values.min() < 0:  # as an index it would count from the end
            raise self._error(chunk, f"has a negative token, {values.min()}")
        return values

    def _open_chunk(self, chunk: int) -> IO[bytes]:
        with contextlib.suppress(KeyError, RuntimeError, StopIteration):  # another thread was faster
            if sum(len(array._open) for array in _arrays) >= _OPEN_CHUNKS:
                fullest = max(_arrays, key=lambda array: len(array._open))._open
                del fullest[next(iter(fullest))]  # closed after the last thread has read from it
        file = self._open[chunk] = open(self.folder / self.files[chunk], "rb", buffering=0)  # noqa: SIM115
        return file

    def _error(self, chunk: int, problem: str) -> DataError:
        prepared = self.checksums is not None
        fix = f"delete {self.folder.parent} and prepare the data again" if prepared else "restore this file"
        fix += " (see streaming: prepared tokens)"
        return DataError(f"{self.folder / self.files[chunk]}: {problem}; {fix}")

    def _check_files(self) -> None:
        with os.scandir(self.folder) as entries:
            present = {entry.name for entry in entries if entry.is_file()}  # one listing, no stat per chunk
        for chunk, name in enumerate(self.files):
            if name not in present:
                raise ValueError(f"{self.folder / name} is missing")
            if len(self.files) <= _STAT_CHUNKS:
                size = (self.folder / name).stat().st_size
                min_size = self.chunk_bytes(chunk)
                if size < min_size:
                    raise ValueError(f"{self.folder / name} is truncated: {size:,} of {min_size:,} bytes")


_arrays: weakref.WeakSet[ChunkedArray] = weakref.WeakSet()
"""Open arrays of this process. They share the limit of open files. A mixture opens at least one per source."""


def read_index(folder: Path) -> Values:
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{folder} contains no {INDEX}")
    try:
        index = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not an index of LitData chunks: {error}") from None
    if not isinstance(index, dict) or not isinstance(index.get("config"), dict):
        raise ValueError(f"{path} is not an index of LitData chunks")
    chunks = index.get("chunks")
    if not isinstance(chunks, list) or not all(map(_is_token_chunk, chunks)):
        raise ValueError(f"{path} does not describe token chunks (written with TokensLoader)")
    return index


def _is_token_chunk(chunk: Any) -> bool:
    numbers = [chunk.get("chunk_size"), chunk.get("dim")] if isinstance(chunk, dict) else [None]
    return all(type(n) is int and n >= 0 for n in numbers)


def _parse_chunk_name(chunk: Values) -> str:
    """Return the file name of a chunk. Reject paths: an untrusted index could point outside its folder (S4)."""
    name = chunk.get("filename")
    if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"{INDEX} lists the chunk {name!r}: only plain file names inside the folder are allowed")
    return name


def _parse_dtype(config: Values) -> np.dtype:
    """Return the token dtype for a data format such as ``no_header_tensor:16``."""
    compression = config.get("compression")
    is_whole = compression is None or (isinstance(compression, str) and re.fullmatch(r"zstd(:\d+)?", compression))
    if not is_whole or config.get("compression_level") in ("batch", "sample") or config.get("encryption"):
        raise ValueError("encrypted chunks, and compression other than zstd of whole chunks, are not supported")
    try:
        (data_format,) = config["data_format"]
        kind, number = data_format.split(":")
        return np.dtype(_TYPES[kind][int(number)])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the data format {config.get('data_format')!r} is not of integers") from error


def format_dtype(dtype: np.dtype) -> str:
    """Return LitData's data format name for an integer dtype."""
    return f"no_header_tensor:{max(n for n, name in _TENSOR_TYPES.items() if name == dtype.name)}"
