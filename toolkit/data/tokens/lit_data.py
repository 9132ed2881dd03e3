"""Pre-tokenized data in LitData's chunk format."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.config import AUTO
from toolkit.config.checks import require_positive
from toolkit.data.base import DataModule, PreparedData, Report, require
from toolkit.data.cache import CHECKSUMS, DAMAGE_ERRORS, MANIFEST, require_preparation, verify
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.io.paths import is_url
from toolkit.io.safe_parse import read_json

if TYPE_CHECKING:
    from toolkit.data.streamed.open_chunks import ChunkRows
    from toolkit.data.tokens.token_store import BlockDataset


@dataclass
class LitData(DataModule):
    """Pre-tokenized chunks, written by litdata.optimize with its TokensLoader (or by prepare_data).

    Local chunks are read where they are. Remote and compressed ones are downloaded while a run trains.

    Args:
        data_path: Folder of the splits, or of the chunks themselves: local, s3://, gs://, hf:// or https://; a glob
            joins several.
        split_names: Subfolders of data_path with the training and validation chunks; null if data_path itself contains
            the training chunks.
        max_cache_gb: Disk space for downloaded training chunks in GB. The oldest are deleted, and downloaded again when
            needed. By default all are kept.
        cache_dir: Cache folder for downloaded chunks; ~/.cache/toolkit/data by default.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    data_path: str
    split_names: tuple[str, str] | None = ("train", "val")
    max_cache_gb: float | None = None
    cache_dir: str | None = None
    num_workers: int = 0

    takes_urls: ClassVar[tuple[str, ...]] = ("data_path",)
    checks_tokens = True  # of large or remote data, only a part is read before the run
    add_bos = AUTO  # no option; None if an older version began the run, whose model has no tokenizer: keep_old_ends()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("data", self, "max_cache_gb")
        from toolkit.io.source_files import require_no_secret

        require_no_secret(self.data_path, "data_path")

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        from toolkit.data.streamed.open_chunks import find_folders, open_chunks, read_tokenizer

        if is_url(self.data_path):
            require_preparation()
        where, block_size = f"--data.data_path {self.data_path}", max_seq_length + 1
        folders = find_folders(self.data_path)
        if tokenizer is None and self.add_bos == AUTO:
            tokenizer = read_tokenizer(folders[0], where, report)
        if "://" in folders[0] or any(map(self._is_compressed, folders)):
            require_preparation()
            opened = open_chunks(self, folders, block_size, report)
        else:
            for name in ("max_cache_gb", "cache_dir"):
                value, hint = getattr(self, name), "has no effect: the chunks are read where they are; remove it"
                require(value is None, name, value, hint)
            opened = self._open_local(folders, block_size, report)
        train, val, content, largest, is_known, summary = opened
        if tokenizer is not None and largest >= tokenizer.vocab_size:
            raise UserError(
                f"{where}: contains token {largest:,}, but {tokenizer.name} has only {tokenizer.vocab_size:,}: the "
                "chunks were made with another tokenizer"
            )
        report(f"Data: {self.data_path}: {summary}")
        content_key = hashlib.sha256(f"{block_size}".encode() + content).hexdigest()
        return PreparedData(train, val, tokenizer, content_key, summary, largest + 1 if tokenizer or is_known else None)

    def _is_compressed(self, folder: str) -> bool:
        """Whether chunks of a local folder are compressed."""
        from toolkit.data.tokens.chunks import INDEX, ChunkIndex

        paths = [Path(folder).expanduser() / name for name in self.split_names or ("",)]
        with suppress(ValueError):  # reported later
            return any((path / INDEX).is_file() and ChunkIndex(path).compression for path in paths)
        return False

    def _open_local(self, folders: list[str], block_size: int, report: Report) -> ChunkRows:
        """Return the rows of chunks that are read where they are."""
        from toolkit.data.interleave import ConcatenatedRows
        from toolkit.data.streamed.open_chunks import ChunkRows

        parts = [self._open(Path(folder).expanduser(), block_size, report) for folder in folders]
        train, val = [train for train, *_ in parts], [val for _, val, *_ in parts if val is not None]
        unread = sum(rows.tail_tokens for rows in (*train, *val))
        summary = (
            f"{sum(map(len, train)):,} train rows of {block_size - 1:,} tokens; "
            f"{f'{sum(map(len, val)):,}' if val else 'no'} val rows; "
            f"{unread:,} leftover tokens at chunk ends do not fill a row"
        )
        content, largest = b"".join(part[2] for part in parts), max(part[3] for part in parts)
        joined: list[Any] = [
            ConcatenatedRows(rows) if len(rows) > 1 else rows[0] if rows else None for rows in (train, val)
        ]
        return ChunkRows(joined[0], joined[1], content, largest, True, summary)

    def _open(
        self, folder: Path, block_size: int, report: Report
    ) -> tuple[BlockDataset, BlockDataset | None, bytes, int]:
        """Return the training rows, validation rows or None, bytes for the content key, and the largest token id."""
        from toolkit.data.tokens.token_store import SPLITS, TOKENS, ChunkBlockDataset, TokenStore, open_splits

        is_store = (folder / MANIFEST).is_file() and (folder / TOKENS).is_dir()
        if is_store or (folder / CHECKSUMS).is_file():  # written by prepare_data; others have no checksums
            try:
                verify(folder)
            except DAMAGE_ERRORS as error:
                raise UserError(f"--data.data_path {self.data_path}: is damaged ({error}); prepare it again") from error
        folders = [folder / name for name in self.split_names or ("",)]
        hint = "; see --data.split_names" if self.split_names else ""
        try:
            if is_store and tuple(self.split_names or ()) == SPLITS:
                manifest = read_json(folder / MANIFEST)
                train, val = open_splits(folder, manifest, block_size)
                content, largest = manifest["key"].encode(), int(manifest["largest_token"])
            else:
                for part in folders:
                    require(
                        part.is_dir(), "data_path", self.data_path, f"no folder {part}{hint}; text: --data TextFiles"
                    )
                rows = [ChunkBlockDataset(TokenStore(part), block_size) for part in folders]
                if any(part.store.array.checksums is None for part in rows):
                    report(f"Data: {folder}: not verified: it has no checksums")
                train, val, *_ = [*rows, None]
                digests, tokens = zip(*(part.store.array.survey() for part in rows), strict=True)
                content, largest = b"".join(digests), max(tokens)
        except UserError:
            raise
        except DAMAGE_ERRORS as error:
            raise UserError(f"--data.data_path {self.data_path}: {error}{hint}") from error
        for split in (train, val):
            if split is not None and not len(split):
                raise UserError(
                    f"--data.data_path {self.data_path}: no chunk in {split.store.folder} has a row of {block_size:,}"
                    " tokens (--train.max_seq_length + 1); provide more text or reduce --train.max_seq_length"
                )
        return train, val, content, largest
