"""Pre-tokenized data in LitData's chunk format."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.base import DataModule, PreparedData, Report, require
from toolkit.data.cache import CHECKSUMS, DAMAGE_ERRORS, MANIFEST, verify
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.io.safe_parse import read_json

if TYPE_CHECKING:
    from toolkit.data.tokens.store import BlockDataset


@dataclass
class LitData(DataModule):
    """Pre-tokenized chunks, written by litdata.optimize with its TokensLoader (or by prepare_data).

    Args:
        data_path: Folder of the splits, or of the chunks themselves.
        split_names: Subfolders of data_path with the training and validation chunks; null if data_path itself contains
            the training chunks.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    data_path: str
    split_names: tuple[str, str] | None = ("train", "val")
    num_workers: int = 0

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        folder, block_size = Path(self.data_path).expanduser(), max_seq_length + 1
        train, val, content, largest = self._open(folder, block_size, report)
        if tokenizer is not None and largest >= tokenizer.vocab_size:
            raise UserError(
                f"--data.data_path {self.data_path}: contains token {largest:,}, but {tokenizer.name} has only"
                f" {tokenizer.vocab_size:,}: the chunks were made with another tokenizer"
            )
        tails = sum(split.tail_tokens for split in (train, val) if split is not None)
        held_out = "no val rows" if val is None else f"{len(val):,} val rows"
        summary = f"{len(train):,} train rows of {max_seq_length:,} tokens; {held_out}"
        report(f"Data: {self.data_path}: {summary}; {tails:,} leftover tokens at chunk ends do not fill a row")
        content_key = hashlib.sha256(f"{block_size}".encode() + content).hexdigest()
        return PreparedData(train, val, tokenizer, content_key, summary, largest + 1)

    def _open(
        self, folder: Path, block_size: int, report: Report
    ) -> tuple[BlockDataset, BlockDataset | None, bytes, int]:
        """Return the training rows, validation rows or None, bytes for the content key, and the largest token id."""
        from toolkit.data.tokens.store import SPLITS, TOKENS, ChunkBlockDataset, TokenStore, open_splits

        is_store = (folder / MANIFEST).is_file() and (folder / TOKENS).is_dir()
        if is_store or (folder / CHECKSUMS).is_file():  # written by prepare_data; others have no checksums
            try:
                verify(folder, report)
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
                    require(part.is_dir(), "data_path", self.data_path, f"no folder {part}{hint}")
                rows = [ChunkBlockDataset(TokenStore(part), block_size) for part in folders]
                train, val, *_ = [*rows, None]
                digests, tokens = zip(*(part.survey() for part in rows), strict=True)
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
