"""Character-level text data, as in minGPT."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from toolkit.config.checks import require_positive
from toolkit.data.base import AUTO, AddBos, PreparedData, Report, TextPaths, require
from toolkit.data.cache import MANIFEST, choose_cache_dir, load_or_prepare, read_manifest
from toolkit.data.text.text_files import FileText
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.io.paths import is_url

_CONTENT = "content"


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
    """

    path: str
    block_size: int | None = None
    train_split: float = 0.9
    truncate: float = 1.0
    add_bos: AddBos = AUTO
    cache_dir: str | None = None
    num_workers: int = 0

    takes_urls: ClassVar[tuple[str, ...]] = ("path",)

    def __post_init__(self) -> None:
        require_positive("data", self, "block_size")
        for name in ("train_split", "truncate"):
            share = getattr(self, name)
            require(0 < share <= 1, name, share, "must be greater than 0 and at most 1")
        super().__post_init__()

    @property
    def text_fraction(self) -> float:  # type: ignore[override]
        """See :class:`FileText`."""
        return self.truncate

    @property
    def val_fraction(self) -> float:  # type: ignore[override]
        """See :class:`FileText`."""
        return round(1 - self.train_split, 12)

    @property
    def seq_length(self) -> int | None:
        return self.block_size

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
    from toolkit.data.streamed.files import require_no_secret, storage_errors

    require_no_secret(url, "path")
    key = hashlib.sha256(url.encode()).hexdigest()
    folder = choose_cache_dir(cache_dir) / f"file-{key[:16]}"

    def read() -> Path:
        read_manifest(folder, key)
        return folder / _CONTENT

    def make(temporary: Path) -> None:
        with storage_errors(f"--data.path {url}", url):
            import fsspec

            with fsspec.open(url, "rb") as source, open(temporary / _CONTENT, "wb") as file:
                shutil.copyfileobj(source, file)
        (temporary / MANIFEST).write_text(json.dumps({"key": key, "url": url}), encoding="utf-8")

    copy, is_cached = load_or_prepare(folder, f"downloading {url}", read, make, report)
    if is_cached:
        report(f"Data: reading {url} from its copy in {folder}; delete the folder to download it again")
    return copy
