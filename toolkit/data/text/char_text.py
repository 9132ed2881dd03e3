"""One text file, a token per character: the data of minGPT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from toolkit.data.base import DataModule, PreparedData, require
from toolkit.errors import UserError
from toolkit.io.paths import is_url

if TYPE_CHECKING:
    from toolkit.data.tokenizer import Tokenizer


@dataclass
class CharText(DataModule):
    """The characters of a text file as tokens. The vocabulary is saved with every checkpoint.

    Args:
        path: A UTF-8 text file, or the URL of one, which is downloaded into the cache once.
        block_size: Characters per sequence. Default: --train.max_seq_length.
        train_split: Share of the text to train on; the end of the text is held out.
        truncate: Share of the text to use, from its start.
        cache_dir: Cache folder for prepared data; ~/.cache/toolkit/data by default.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    path: str
    block_size: int | None = None
    train_split: float = 0.9
    truncate: float = 1.0
    cache_dir: str | None = None
    num_workers: int = 0

    takes_urls: ClassVar[tuple[str, ...]] = ("path",)

    def __post_init__(self) -> None:
        size, workers = self.block_size, self.num_workers
        require(size is None or size > 0, "block_size", size, "must be greater than 0")
        for name in ("train_split", "truncate"):
            share = getattr(self, name)
            require(0 < share <= 1, name, share, "must be greater than 0 and at most 1")
        require(workers >= 0, "num_workers", workers, "must not be negative")

    @property
    def seq_length(self) -> int | None:
        """See :attr:`DataModule.seq_length`."""
        return self.block_size

    def prepare(
        self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Callable[[str], None] = print
    ) -> PreparedData:
        """See :meth:`DataModule.prepare`."""
        from toolkit.data.text.fetch import fetch
        from toolkit.data.text.prepare import TextSources, prepare_text

        if tokenizer is not None and not tokenizer.is_character_level():
            raise UserError(
                f"--data CharText: {tokenizer.name} has longer tokens than characters; use --data TextFiles"
            )
        option = f"--data.path {self.path}"
        file = fetch(self.path, "path", self.cache_dir, report) if is_url(self.path) else Path(self.path).expanduser()
        if not file.is_file():
            raise UserError(f"{option}: no such file; give a text file or its URL")
        sources = TextSources(
            module="char_text",
            train=[file],
            val=None,
            train_option=option,
            val_option=f"--data.train_split {self.train_split}",
            val_fraction=round(1 - self.train_split, 12),
            vocab_size="characters",
            text_fraction=self.truncate,
            cache_dir=self.cache_dir,
        )
        return prepare_text(sources, tokenizer=tokenizer, max_seq_length=max_seq_length, report=report)
