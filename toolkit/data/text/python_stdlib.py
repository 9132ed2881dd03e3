"""Use the source code of Python's standard library as text data, available on every machine."""

from __future__ import annotations

import contextlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from toolkit.data.base import (
    AUTO,
    DEFAULT_VAL_FRACTION,
    AddBos,
    DataModule,
    PreparedData,
    Report,
    Vocabulary,
    require_text_options,
    trained_vocabulary,
)
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError

# Installed packages, tests, and bulk data such as encoding tables, documentation strings and build settings.
_EXCLUDED = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip",
    "encodings", "pydoc_data", "__phello__", "__pycache__",
}  # fmt: skip
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")


@dataclass
class PythonStdlib(DataModule):
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

    def __post_init__(self) -> None:
        require_text_options(self)

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        from toolkit.data.text.prepare import TextSources, prepare_text

        fraction = DEFAULT_VAL_FRACTION if self.val_fraction is None else self.val_fraction
        sources = TextSources(
            module="python_stdlib",
            train=find_sources(),
            val=None,
            train_option="--data PythonStdlib",
            val_option=f"--data.val_fraction {fraction}",
            val_fraction=fraction,
            vocab_size=trained_vocabulary(self),
            add_bos=self.add_bos,
            cache_dir=self.cache_dir,
        )
        return prepare_text(sources, tokenizer=tokenizer, max_seq_length=max_seq_length, report=report)


def find_sources() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_included(name)]  # prune excluded folders
        files += [Path(folder, name) for name in names if name.endswith(".py") and _is_included(name)]
    files = sorted(path for path in files if _is_utf8(path))
    if not files:
        raise UserError(f"--data PythonStdlib: no Python source in {root}; use --data TextFiles with your own text")
    return files


def _is_included(name: str) -> bool:
    return name not in _EXCLUDED and not name.startswith(_EXCLUDED_PREFIXES)


def _is_utf8(path: Path) -> bool:
    with contextlib.suppress(UnicodeDecodeError, OSError):
        path.read_bytes().decode("utf-8")
        return True
    return False
