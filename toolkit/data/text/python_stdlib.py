"""Find the source code of Python's standard library, text that every machine has."""

import contextlib
import os
import sysconfig
from pathlib import Path

from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError

# Installed packages, tests, and bulk data such as encoding tables, documentation strings and build settings.
_EXCLUDED = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip",
    "encodings", "pydoc_data", "__phello__", "__pycache__",
}  # fmt: skip
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")
_BYTES_PER_TOKEN = 3.63  # with the BPE of 4096 tokens that is trained on this text


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


def estimate_tokens(tokenizer: Tokenizer | None) -> float:
    """Estimate the tokens of the text, with ``tokenizer`` from every 20th file."""
    files = find_sources()
    bytes_per_token = _BYTES_PER_TOKEN
    if tokenizer is not None:
        texts = [path.read_text(encoding="utf-8") for path in files[::20]]
        bytes_per_token = sum(len(text.encode()) for text in texts) / sum(map(len, tokenizer.encode_batch(texts)))
    return sum(path.stat().st_size for path in files) / bytes_per_token


def _is_included(name: str) -> bool:
    return name not in _EXCLUDED and not name.startswith(_EXCLUDED_PREFIXES)


def _is_utf8(path: Path) -> bool:
    with contextlib.suppress(UnicodeDecodeError, OSError):
        path.read_bytes().decode("utf-8")
        return True
    return False
