"""Pre-tokenized data in LitData's chunk format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.base import DataModule, PreparedData, require
from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.data.tokenizer import Tokenizer
    from toolkit.data.tokens.chunks import TokenRows


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

    def __post_init__(self) -> None:
        require(self.num_workers >= 0, "num_workers", self.num_workers, "must not be negative")

    def prepare(
        self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Callable[[str], None] = print
    ) -> PreparedData:
        """See :meth:`DataModule.prepare`; nothing is written."""
        self._verify(report)
        names = [""] if self.split_names is None else list(self.split_names)
        splits = [self._open_split(name, max_seq_length + 1) for name in names]
        content = hashlib.sha256(f"{max_seq_length + 1}".encode())
        largest = 0
        for split in splits:
            digest, split_largest = split.survey()
            content.update(digest)
            largest = max(largest, split_largest)
        if tokenizer is not None and largest >= tokenizer.vocab_size:
            raise UserError(
                f"--data.data_path {self.data_path}: contains token {largest:,}, but {tokenizer.name} has only"
                f" {tokenizer.vocab_size:,}: the chunks were made with another tokenizer"
            )
        train, val = splits[0], splits[1] if len(splits) > 1 else None
        tails = sum(split.tail_tokens for split in splits)
        held_out = "no val rows" if val is None else f"{len(val):,} val rows"
        summary = f"{len(train):,} train rows of {max_seq_length:,} tokens; {held_out}"
        report(f"Data: {self.data_path}: {summary}; {tails:,} leftover tokens at chunk ends do not fill a row")
        return PreparedData(train, val, tokenizer, content.hexdigest(), summary, largest + 1)

    def _verify(self, report: Callable[[str], None]) -> None:
        """Check the bytes of a folder written by prepare_data; others have no checksums."""
        from toolkit.data.cache import CHECKSUMS, DAMAGE_ERRORS, verify

        folder = Path(self.data_path).expanduser()
        if (folder / CHECKSUMS).is_file():
            try:
                verify(folder, report)
            except DAMAGE_ERRORS as error:
                raise UserError(f"--data.data_path {self.data_path}: is damaged ({error}); prepare it again") from error

    def _open_split(self, name: str, block_size: int) -> TokenRows:
        from toolkit.data.tokens.chunks import TokenRows

        folder = Path(self.data_path).expanduser() / name
        hint = "; see --data.split_names" if self.split_names else ""
        if not folder.is_dir():
            raise UserError(f"--data.data_path {self.data_path}: no folder {folder}{hint}")
        try:
            rows = TokenRows(folder, block_size)
        except ValueError as error:
            raise UserError(f"--data.data_path {self.data_path}: {error}{hint}") from error
        if len(rows) == 0:
            raise UserError(
                f"--data.data_path {self.data_path}: no chunk in {folder} has a row of {block_size:,} tokens"
                " (--train.max_seq_length + 1); provide more text or reduce --train.max_seq_length"
            )
        return rows
