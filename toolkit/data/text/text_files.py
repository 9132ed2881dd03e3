"""Data modules for text files, which are tokenized before the run."""

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from toolkit.config.checks import require_positive
from toolkit.data.base import (
    AUTO,
    AddBos,
    Content,
    DataModule,
    PreparedData,
    Report,
    TextPaths,
    Vocabulary,
    held_out_fraction,
    require,
    require_one,
    require_val_fraction,
    trained_vocabulary,
)
from toolkit.data.cache import choose_cache_dir, load_or_prepare
from toolkit.data.text import python_stdlib
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.io.paths import is_url

_CONTENT = "content"  # file name of a download


class FileText(DataModule):
    """Text files, tokenized before the run. A subclass is a dataclass with these options."""

    vocab_size: Vocabulary | None = "characters"
    val_fraction: float | None
    add_bos: AddBos
    cache_dir: str | None
    text_fraction: float = 1.0
    stride: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_val_fraction(self, "val_fraction")
        size: Any = trained_vocabulary(self)
        is_valid = size == "characters" or size > 256
        require(is_valid, "vocab_size", size, "must be at least 257, the 256 bytes and <|endoftext|>, or characters")

    @abstractmethod
    def find_text(self, report: Report) -> TextPaths:
        """Return the files."""

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        from toolkit.data.text.prepare_text import prepare_text

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

    content: ClassVar[Content] = "text"
    takes_patterns: ClassVar[bool] = True

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

    content: ClassVar[Content] = "text"
    is_stand_in: ClassVar[bool] = True

    def find_text(self, report: Report) -> TextPaths:
        """See :meth:`FileText.find_text`."""
        return TextPaths(python_stdlib.find_sources(), "--data PythonStdlib")

    def estimate_rows(self, tokenizer: Tokenizer | None, max_seq_length: int) -> int | None:
        """See :meth:`DataModule.estimate_rows`."""
        if tokenizer is None and self.vocab_size is not None:
            return None
        trained = (1 - held_out_fraction(self.val_fraction, None)) * python_stdlib.estimate_tokens(tokenizer)
        return int(trained) // (max_seq_length + 1)


def _find_files(value: str, option: str) -> list[Path]:
    from toolkit.io.source_files import find_files

    return [Path(file.url) for file in find_files(value, option)]


@dataclass
class CharText(FileText):
    """The characters of a text file as tokens. The vocabulary is saved with every checkpoint.

    Args:
        path: A UTF-8 text file, or its URL. A URL is downloaded into the cache once.
        block_size: Characters per sequence. Default: --train.max_seq_length.
        train_split: Fraction of the text to train on; the rest is held out for validation.
        truncate: Fraction of the text to use, from the start.
        add_bos: Whether each document begins with bos. auto: if the tokenizer adds it; null: no, as in toolkit 0.1.0.
        cache_dir: Cache folder for prepared data; ~/.cache/toolkit/data by default.
        num_workers: Data loading processes; 0 reads in the training process.
        stride: Characters from the start of a training row to the start of the next; 1 is minGPT's. Default: rows do
            not overlap.
    """

    path: str
    block_size: int | None = None
    train_split: float = 0.9
    truncate: float = 1.0
    add_bos: AddBos = AUTO
    cache_dir: str | None = None
    num_workers: int = 0
    stride: int | None = None

    takes_urls: ClassVar[tuple[str, ...]] = ("path",)

    def __post_init__(self) -> None:
        require_positive("data", self, "block_size", "stride")
        for name in ("train_split", "truncate"):
            share = getattr(self, name)
            require(0 < share <= 1, name, share, "must be greater than 0 and at most 1")
        self.seq_length, self.text_fraction = self.block_size, self.truncate
        self.val_fraction = round(1 - self.train_split, 12)
        super().__post_init__()

    def find_text(self, report: Report) -> TextPaths:
        """See :meth:`FileText.find_text`."""
        option = f"--data.path {self.path}"
        file = _fetch(self.path, self.cache_dir, report) if is_url(self.path) else Path(self.path).expanduser()
        if not file.is_file():
            raise UserError(f"{option}: no such file; provide a text file or its URL")
        return TextPaths([file], option, val_option=f"--data.train_split {self.train_split}")

    def prepare(self, *, tokenizer: Tokenizer | None, **options: Any) -> PreparedData:
        """See :meth:`DataModule.prepare`."""
        if tokenizer is not None and not tokenizer.is_character_level():
            raise UserError(
                f"--data CharText: the tokenizer {tokenizer.name} has tokens of more than one character; use "
                "--data TextFiles"
            )
        return super().prepare(tokenizer=tokenizer, **options)


def _fetch(url: str, cache_dir: str | None, report: Report) -> Path:
    """Download a file from any fsspec URL into the cache, unless cached. Return the local path."""
    from toolkit.io.source_files import require_no_secret
    from toolkit.io.storage import open_storage, storage_errors

    require_no_secret(url, "path")
    folder = choose_cache_dir(cache_dir) / f"file-{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def make(temporary: Path) -> None:
        with storage_errors(f"--data.path {url}", url):
            fs, path = open_storage(url)
            fs.get_file(path, str(temporary / _CONTENT))

    copy, is_cached = load_or_prepare(folder, f"downloading {url}", lambda: folder / _CONTENT, make, report)
    if is_cached:
        report(f"Data: reading {url} from its copy in {folder}; delete the folder to download it again")
    return copy
