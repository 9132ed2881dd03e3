"""Storage format of prepared tokens, for text and instruction data.

    <folder>/tokens/      all tokens, concatenated, in LitData's flat chunk format (TokensLoader): uint16 or int32
             loss_mask/   same format, uint8: 1 where a token has loss; instruction data only

``litdata.StreamingDataset(f"{folder}/tokens", item_loader=TokensLoader(block_size))`` also reads the tokens, but
drops those at the end of a chunk that do not fill a block.
"""

import json
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from toolkit.data.base import Row, TokenDataset, Values, next_token_row
from toolkit.data.cache import CRC_FILE
from toolkit.data.tokens.chunks import INDEX, PIECE, ChunkedArray, format_dtype

TOKENS, LOSS_MASK = "tokens", "loss_mask"
SPLITS = ("train", "val")
TOKENS_PER_CHUNK = 1 << 23  # 16 or 32 MB
_INDEX_CONFIG = {
    "chunk_bytes": None, "compression": None, "compression_batch_size": None, "compression_level": None,
    "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]', "encryption": None,
    "ipc_compression": None, "item_loader": "TokensLoader", "types": "tensor",
}  # fmt: skip
"""Index fields that LitData writes for chunks of a single tensor."""


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


class TokenWriter:
    """Streams tokens to a folder for :class:`TokenStore`. Uses the memory of a few chunks.

    Writes are not atomic. Write to a staging folder (:mod:`toolkit.data.cache`) and rename it when complete.

    Args:
        folder: Output folder, created if missing.
        dtype: uint16 or int32, see :func:`token_dtype`.
        with_loss_mask: Whether tokens have a loss mask.
        tokens_per_chunk: Chunk size in tokens; the last chunk may be smaller.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: npt.DTypeLike,
        *,
        with_loss_mask: bool = False,
        tokens_per_chunk: int | None = None,
    ) -> None:
        dtypes = {TOKENS: np.dtype(dtype)} | ({LOSS_MASK: np.dtype(np.uint8)} if with_loss_mask else {})
        per_chunk = tokens_per_chunk or TOKENS_PER_CHUNK
        self._writers = [_ArrayWriter(Path(folder) / name, kind, per_chunk) for name, kind in dtypes.items()]

    @property
    def n_tokens(self) -> int:
        return self._writers[0].size

    @property
    def largest_token(self) -> int:
        """The largest token id so far, or -1."""
        return self._writers[0].largest

    def add(self, ids: Sequence[int] | np.ndarray, loss_mask: Sequence[bool] | np.ndarray | None = None) -> None:
        """Append tokens. ``loss_mask`` has one value per token."""
        arrays = [ids] if loss_mask is None else [ids, loss_mask]
        for writer, values in zip(self._writers, arrays, strict=True):
            writer.add(np.asarray(values))

    def finish(self) -> int:
        """Write the last chunk and the index. Return the number of tokens. A folder without tokens cannot be opened."""
        for writer in self._writers:
            writer.finish()
        return self.n_tokens


class _ArrayWriter:
    """Streams one array to chunks, and the CRC-32 of each piece to ``crc32.npy``.

    LitData's writer would write the same files. Importing that writer loads torch and cloud clients, which takes
    as long as tokenizing 10 MB.
    """

    def __init__(self, folder: Path, dtype: np.dtype, per_chunk: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.size, self.largest = folder, 0, -1
        self._buffer, self._checksums = np.empty(per_chunk, dtype), array("I")
        self._chunks: list[Values] = []

    def add(self, values: np.ndarray) -> None:
        if len(values):
            self.largest = max(self.largest, int(values.max()))
            assert values.min() >= 0 and self.largest <= np.iinfo(self._buffer.dtype).max  # NumPy would wrap them
        while len(values):
            filled = self.size % len(self._buffer)
            part = values[: len(self._buffer) - filled]
            self._buffer[filled : filled + len(part)] = part
            self.size += len(part)
            values = values[len(part) :]
            if self.size % len(self._buffer) == 0:
                self._write_chunk(self._buffer)

    def finish(self) -> None:
        if (filled := self.size % len(self._buffer)) or not self.size:
            self._write_chunk(self._buffer[:filled])
        config = _INDEX_CONFIG | {"chunk_size": len(self._buffer), "data_format": [format_dtype(self._buffer.dtype)]}
        index = {"chunks": self._chunks, "config": config}
        (self.folder / INDEX).write_text(json.dumps(index, sort_keys=True), encoding="utf-8")
        np.save(self.folder / CRC_FILE, np.asarray(self._checksums, np.uint32))

    def _write_chunk(self, values: np.ndarray) -> None:
        self._checksums.extend(zlib.crc32(values[start : start + PIECE].data) for start in range(0, len(values), PIECE))
        # Header of a chunk with one item: number of items, start offset and end offset of the item in bytes.
        header = np.array([1, 12, 12 + values.nbytes], np.uint32)
        name = f"chunk-0-{len(self._chunks)}.bin"
        with open(self.folder / name, "wb") as file:
            file.write(header.data)
            file.write(values.data)
        size = {"chunk_bytes": header.nbytes + values.nbytes, "chunk_size": 1, "dim": len(values) or None}
        self._chunks.append(size | {"filename": name})


class TokenStore:
    """Tokens written by :class:`TokenWriter` or LitData. Opening 1 TB takes as long as 1 GB. Picklable.

    Args:
        folder: A folder written by :class:`TokenWriter`, or a folder of LitData chunks.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        has_parts = (self.folder / TOKENS).is_dir()
        self.array = ChunkedArray(self.folder / TOKENS if has_parts else self.folder)
        has_mask = has_parts and (self.folder / LOSS_MASK).is_dir()
        self.mask = ChunkedArray(self.folder / LOSS_MASK) if has_mask else None
        if self.mask is not None and len(self.mask) != len(self.array):
            raise ValueError(f"{self.folder}: the loss mask has {len(self.mask):,} of {len(self.array):,} values")

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def n_tokens(self) -> int:
        return len(self.array)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens in [start, stop), shape (stop - start,), in the store's dtype."""
        return self.array.read(start, stop)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Return the loss mask of the tokens in [start, stop), shape (stop - start,), bool."""
        assert self.mask is not None, "these tokens were written without a loss mask"
        return self.mask.read(start, stop).astype(np.bool_)


class BlockDataset(TokenDataset):
    """Rows of T + 1 consecutive tokens; see :class:`toolkit.data.base.TokenDataset`.

    Args:
        block_size: T + 1.
        start: The first token.
        stop: End of the tokens; None for all. A tail of fewer than ``block_size`` tokens is not used.
        stride: Tokens from the start of a row to the start of the next; None: rows do not overlap.
    """

    def __init__(
        self, store: TokenStore, block_size: int, start: int = 0, stop: int | None = None, stride: int | None = None
    ) -> None:
        self.store, self.block_size, self.start, self.stride = store, block_size, start, stride or block_size
        self.n_tokens = (store.n_tokens if stop is None else stop) - start
        if not 0 <= start <= start + self.n_tokens <= store.n_tokens:
            raise ValueError(f"{store.folder} has no tokens {start:,} to {stop:,}: it has {store.n_tokens:,}")

    @property
    def tail_tokens(self) -> int:
        """Number of tokens that do not fill a block."""
        return self.n_tokens - len(self) * self.stride - (self.block_size - self.stride)

    def __len__(self) -> int:
        return max(0, self.n_tokens - self.block_size + self.stride) // self.stride

    def __getitem__(self, index: int) -> Row:
        self.require_row(index)
        start = self.find_row(index)
        return next_token_row(self.store.tokens(start, start + self.block_size))

    def find_row(self, index: int) -> int:
        return self.start + index * self.stride

    def largest_token(self) -> int:
        return self.store.array.survey()[1]


class ChunkBlockDataset(BlockDataset):
    """Rows that do not span chunks, as in LitData's TokensLoader. Each chunk may have an unused tail."""

    def __init__(self, store: TokenStore, block_size: int) -> None:
        super().__init__(store, block_size)
        sizes = np.asarray(store.array.sizes, np.int64)
        self._row_ends = np.cumsum(sizes // block_size)
        self._skipped = np.cumsum(sizes % block_size)

    def __len__(self) -> int:
        return int(self._row_ends[-1]) if len(self._row_ends) else 0

    def find_row(self, index: int) -> int:
        chunk = int(np.searchsorted(self._row_ends, index, side="right"))
        return index * self.block_size + (int(self._skipped[chunk - 1]) if chunk else 0)


def open_splits(
    folder: Path, manifest: Values, block_size: int, stride: int | None = None
) -> tuple[BlockDataset, BlockDataset | None]:
    """Open the training and validation rows of a folder, by the token ranges in the manifest.

    ``stride``: of the training rows, see :class:`BlockDataset`.
    """
    store, splits = TokenStore(folder), manifest.get("splits")
    if splits is None:
        raise ValueError(f"{folder} holds samples with a loss mask; only the data module that prepared them reads them")
    val = None if splits["val"] is None else BlockDataset(store, block_size, *splits["val"])
    start, stop = splits["train"]
    return BlockDataset(store, block_size, start, stop, stride), val
