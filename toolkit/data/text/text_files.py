"""Data modules for text files, which are tokenized before the run."""

import glob
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.data.base import (
    AUTO,
    AddBos,
    DataModule,
    PreparedData,
    Report,
    TextPaths,
    Vocabulary,
    require,
    require_one,
    require_val_fraction,
    trained_vocabulary,
)
from toolkit.data.text import python_stdlib
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError


class FileText(DataModule):
    """Text files, tokenized before the run. A subclass is a dataclass with these options.

    Without an option vocab_size, it trains a character-level tokenizer if it gets none.
    """

    val_fraction: float | None
    add_bos: AddBos
    cache_dir: str | None
    text_fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_val_fraction(self, "val_fraction")
        size: Any = trained_vocabulary(self) or "characters"
        is_valid = size == "characters" or size > 256
        require(is_valid, "vocab_size", size, "must be at least 257, the 256 bytes and <|endoftext|>, or characters")

    @abstractmethod
    def find_text(self, report: Report) -> TextPaths:
        """Return the files."""

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        from toolkit.data.text.prepare import prepare_text

        return prepare_text(self, self.find_text(report), tokenizer, max_seq_length, report)


@dataclass
class TextFiles(FileText):
    r"""UTF-8 text files; each file is one document. \r\n becomes \n, and a byte order mark is dropped.

    Args:
        train_data_path: A file, a folder (recursive, without hidden files) or a glob such as 'books/*.txt'.
        val_data_path: Validation text, in the same form.
        val_fraction: Fraction of tokens held out for validation if val_data_path is not set; 0 for none. Default 0.05.
        vocab_size: Size of the byte-level BPE tokenizer to train without --tokenizer_dir, 4096 by default; or
            characters, for a character-level tokenizer.
        text_fraction: Fraction of the training text to use, from the start, such as 0.05 for a quick trial.
        add_bos: Whether each document begins with bos. auto: if the tokenizer adds it; null: no, as in toolkit 0.1.0.
        cache_dir: Cache folder for prepared data; ~/.cache/toolkit/data by default.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    train_data_path: str
    val_data_path: str | None = None
    val_fraction: float | None = None
    vocab_size: Vocabulary | None = None
    text_fraction: float = 1.0
    add_bos: AddBos = AUTO
    cache_dir: str | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one(self, "val_fraction", "val_data_path")
        share = self.text_fraction
        require(0 < share <= 1, "text_fraction", share, "must be greater than 0 and at most 1")

    def find_text(self, report: Report) -> TextPaths:
        """See :meth:`FileText.find_text`."""
        option = f"--data.train_data_path {self.train_data_path}"
        train = _find_files(self.train_data_path, option)
        if self.val_data_path is None:
            return TextPaths(train, option)
        val_option = f"--data.val_data_path {self.val_data_path}"
        val = _find_files(self.val_data_path, val_option)
        if both := sorted({p.resolve() for p in train} & {p.resolve() for p in val}):
            raise UserError(f"{val_option}: {both[0]} is also training text; exclude it from --data.train_data_path")
        return TextPaths(train, option, val, val_option)


@dataclass
class PythonStdlib(FileText):
    """The source code of Python's standard library, about 9 MB; each module is one document.

    Args:
        vocab_size: Size of the byte-level BPE tokenizer to train without --tokenizer_dir, 4096 by default; or
            characters, for a character-level tokenizer.
        val_fraction: Fraction of tokens held out for validation; 0 for none. Default 0.05.
        add_bos: Whether each document begins with bos. auto: if the tokenizer adds it; null: no, as in toolkit 0.1.0.
        cache_dir: Cache folder for prepared data; ~/.cache/toolkit/data by default.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    vocab_size: Vocabulary | None = None
    val_fraction: float | None = None
    add_bos: AddBos = AUTO
    cache_dir: str | None = None
    num_workers: int = 0

    def find_text(self, report: Report) -> TextPaths:
        """See :meth:`FileText.find_text`."""
        return TextPaths(python_stdlib.find_sources(), "--data PythonStdlib")


def _find_files(value: str, option: str) -> list[Path]:
    path = Path(value).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = [p for p in below if p.is_file()]
        problem = "the folder has no files"
    else:
        files = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
        missing = "not a regular file" if path.exists() else "no such file or folder"
        problem = "no file matches" if glob.has_magic(value) else missing
    if not files:
        raise UserError(f"{option}: {problem}; provide a text file, a folder of text files or a glob")
    return sorted(set(files))
