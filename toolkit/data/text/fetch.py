"""A file from a URL, downloaded once into the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from toolkit.data.cache import MANIFEST, choose_cache_dir, load_or_prepare, read_manifest
from toolkit.data.streamed.files import require_no_secret, storage_errors

_CONTENT = "content"
_BLOCK = 1 << 20  # bytes


def fetch(url: str, option: str, cache_dir: str | None, report: Callable[[str], None]) -> Path:
    """Return the local copy of a file at any URL that fsspec reads. A copy in the cache is not downloaded again.

    Args:
        url: Such as https://host/input.txt or s3://bucket/input.txt.
        option: The option of ``--data`` that gives it.
        cache_dir: Cache folder for prepared data.
        report: Receives progress lines.
    """
    require_no_secret(url, option)
    key = hashlib.sha256(url.encode()).hexdigest()
    folder = choose_cache_dir(cache_dir) / f"file-{key[:16]}"

    def read() -> Path:
        read_manifest(folder, key)
        return folder / _CONTENT

    def make(temporary: Path) -> None:
        with open(temporary / _CONTENT, "wb") as file:
            for block in _read_blocks(url, f"--data.{option} {url}"):
                file.write(block)
        (temporary / MANIFEST).write_text(json.dumps({"key": key, "url": url}), encoding="utf-8")

    copy, is_cached = load_or_prepare(folder, f"downloading {url}", read, make, report)
    if is_cached:
        report(f"Data: reading {url} from its copy in {folder}; delete the folder to download it again")
    return copy


def _read_blocks(url: str, where: str) -> Iterator[bytes]:
    with storage_errors(where, url):
        import fsspec

        with fsspec.open(url, "rb") as source:
            while block := source.read(_BLOCK):
                yield block
