"""Token folders in LitData's chunk format: written with LitData's writer, read by global row index.

``litdata.optimize`` writes the same files but starts processes: 6 s more, and a calling script without a ``__main__``
guard would run itself again. ``StreamingDataset`` reads them, but checks for updates over the network, divides its
length by the number of ranks, and is at least twice as slow for random access.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

INDEX = "index.json"
_TOKENS_PER_CHUNK = 1 << 23  # 16 or 32 MB
_OPEN_CHUNKS = 128  # each holds a file descriptor
_READ_ALL_BYTES = 1 << 30  # above this, survey() samples
_SAMPLES, _SAMPLE = 16, 1 << 14  # samples per chunk, tokens per sample
_PIECE = 1 << 22  # tokens


def write_chunks(tokens: np.ndarray, folder: Path, block_size: int) -> int:
    """Write the full blocks of ``tokens`` (1-D, uint16 or int32, may be a memory map) as LitData chunks.

    Every chunk holds only full blocks, so LitData's TokensLoader drops nothing either.

    Returns:
        The number of leftover tokens at the end, less than ``block_size``.
    """
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    n_full = len(tokens) // block_size * block_size
    per_chunk = max(1, _TOKENS_PER_CHUNK // block_size) * block_size
    # One item is one chunk: the writer closes a chunk when a second item would not fit.
    writer = BinaryWriter(str(folder), chunk_size=per_chunk, item_loader=TokensLoader())
    for i, start in enumerate(range(0, n_full, per_chunk)):
        writer[i] = torch.from_numpy(np.array(tokens[start : min(start + per_chunk, n_full)]))
    writer.done()
    # One writer, so its index is complete. (LitData's merge would wait for all ranks of a process group.)
    os.replace(folder / f"{writer.rank}.{INDEX}", folder / INDEX)
    return len(tokens) - n_full


class TokenRows:
    """The rows of a chunk folder; see :class:`toolkit.data.base.TokenDataset`. A row is a block of T + 1 tokens.

    Args:
        folder: Contains ``index.json`` and the chunks it lists.
        block_size: T + 1.

    Attributes:
        tail_tokens: Tokens at the chunk ends that do not fill a block.

    Raises:
        ValueError: The index is invalid or names a file outside its folder, or a chunk is missing or truncated.
    """

    def __init__(self, folder: str | Path, block_size: int) -> None:
        self.folder = Path(folder)
        self.block_size = block_size
        index = _read_index(self.folder)
        self.dtype = _parse_dtype(index["config"])
        self._files = [_parse_chunk_name(chunk) for chunk in index["chunks"]]
        # A chunk starts with a uint32 header: the number of items, then n + 1 item offsets.
        self._offsets = [4 * (chunk["chunk_size"] + 2) for chunk in index["chunks"]]
        self._sizes = [chunk["dim"] for chunk in index["chunks"]]
        self._check_sizes()
        self._ends = list(accumulate(size // block_size for size in self._sizes))
        self._open: dict[int, np.ndarray] = {}
        self.tail_tokens = sum(size % block_size for size in self._sizes)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        chunk = bisect.bisect_right(self._ends, index)
        start = (index - (self._ends[chunk - 1] if chunk else 0)) * self.block_size
        block = torch.from_numpy(self._tokens(chunk)[start : start + self.block_size].astype(np.int64))
        return {"input_ids": block[:-1], "labels": block[1:]}

    def survey(self) -> tuple[bytes, int]:
        """Scan the tokens once.

        Up to 1 GiB, every token is read. Larger data is sampled: 16 blocks of 16 Ki tokens per chunk, evenly spaced
        from its first token to its last; changes between the samples are not detected.

        Returns:
            SHA-256 of the index and the tokens, and the largest token.
        """
        digest, largest = hashlib.sha256((self.folder / INDEX).read_bytes()), 0
        for tokens in self._samples():
            digest.update(tokens.data)
            largest = max(largest, int(tokens.max()))
        return digest.digest(), largest

    def _samples(self) -> Iterator[np.ndarray]:
        """Yield the non-empty chunk pieces that :meth:`survey` reads."""
        reads_all = sum(self._sizes) * self.dtype.itemsize <= _READ_ALL_BYTES
        for chunk, size in enumerate(self._sizes):
            starts: Sequence[int]
            if reads_all or size <= _SAMPLES * _SAMPLE:
                starts, length = range(0, size, _PIECE), _PIECE
            else:
                starts, length = [i * (size - _SAMPLE) // (_SAMPLES - 1) for i in range(_SAMPLES)], _SAMPLE
            for start in starts:
                yield self._tokens(chunk)[start : start + length]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # memory maps cannot be pickled

    def _tokens(self, chunk: int) -> np.ndarray:
        if chunk not in self._open:
            if len(self._open) >= _OPEN_CHUNKS:
                del self._open[next(iter(self._open))]
            path, shape = self.folder / self._files[chunk], (self._sizes[chunk],)
            # A plain array: slicing np.memmap itself is slow.
            self._open[chunk] = np.asarray(np.memmap(path, self.dtype, "r", self._offsets[chunk], shape))
        return self._open[chunk]

    def _check_sizes(self) -> None:
        for name, offset, size in zip(self._files, self._offsets, self._sizes, strict=True):
            path = self.folder / name
            needed = offset + size * self.dtype.itemsize
            found = path.stat().st_size if path.is_file() else None
            if found is None or found < needed:
                problem = "is missing" if found is None else f"is truncated: {found:,} of {needed:,} bytes"
                raise ValueError(f"{path} {problem}")


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{folder} contains no {INDEX}")
    index = None
    with contextlib.suppress(ValueError):
        index = json.loads(path.read_bytes())
    if not isinstance(index, dict) or not isinstance(index.get("config"), dict):
        raise ValueError(f"{path} is not an index of LitData chunks")
    chunks = index.get("chunks")
    if not isinstance(chunks, list) or not all(map(_is_token_chunk, chunks)):
        raise ValueError(f"{path} does not describe token chunks (written with TokensLoader)")
    return index


def _is_token_chunk(chunk: Any) -> bool:
    numbers = [chunk.get("chunk_size"), chunk.get("dim")] if isinstance(chunk, dict) else [None]
    return all(type(n) is int and n >= 0 for n in numbers)


def _parse_chunk_name(chunk: dict[str, Any]) -> str:
    """Return the file name of a chunk: no path, so that an untrusted index cannot point outside its folder (S4)."""
    name = chunk.get("filename")
    if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\:\0"):
        raise ValueError(f"{INDEX} lists the chunk {name!r}: only plain file names inside the folder are allowed")
    return name


def _parse_dtype(config: dict[str, Any]) -> np.dtype:
    """Return the token dtype for a data format such as ``no_header_tensor:16``."""
    from litdata.constants import _NUMPY_DTYPES_MAPPING, _TORCH_DTYPES_MAPPING

    if config.get("compression") or config.get("encryption"):
        raise ValueError("compressed or encrypted chunks are not supported; write them uncompressed")
    try:
        (data_format,) = config["data_format"]
        kind, number = data_format.split(":")
        if kind == "no_header_numpy":
            dtype = np.dtype(_NUMPY_DTYPES_MAPPING[int(number)])
        elif kind == "no_header_tensor":
            dtype = torch.empty(0, dtype=_TORCH_DTYPES_MAPPING[int(number)]).numpy().dtype
        else:
            raise ValueError(kind)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the data format {config.get('data_format')!r} is not a supported token format") from error
    if dtype.kind not in "iu":
        raise ValueError(f"the tokens are {dtype}, not integers")
    return dtype
