"""Write and verify checksums of a Hugging Face folder: ``SHA256SUMS`` and the hub's ETags.

Exports write ``SHA256SUMS`` for ``sha256sum --check``. ``hf download`` and ``toolkit download`` keep the hub's ETag of
each file: SHA-256 for large files, git's SHA-1 for others.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from toolkit.errors import UserError
from toolkit.io.checksums import is_inside
from toolkit.io.safe_parse import open_regular, read_bounded

SUMS = "SHA256SUMS"
HUB_METADATA = Path(".cache", "huggingface", "download")
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_READ_SIZE = 2**20  # bytes
WEIGHT_SUFFIXES = (".safetensors", ".bin")


def write_sums(folder: Path) -> None:
    """Write ``SHA256SUMS`` for all files of a folder except ``*.md`` and hidden files."""
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".md"]
    names = [file.as_posix() for file in files if not file.parts[0].startswith(".") and file.name != SUMS]
    sums = _hash(folder, names)
    (folder / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in names), encoding="utf-8")


def find_changed(folder: Path) -> list[str]:
    """Return the names of files that differ from their checksums; empty if the folder has no checksums."""
    expected = _hub_sums(folder) | _read_sums(folder)
    actual = _hash(folder, [name for name in expected if os.path.isfile(folder / name)], expected)
    return [name for name, value in expected.items() if name in actual and actual[name] != value]


def require_intact(folder: Path, where: str) -> list[str]:
    """Raise UserError if a weight file differs from its checksum. Return warnings for other changed files."""
    changed = find_changed(folder)
    if weights := [name for name in changed if name.endswith(WEIGHT_SUFFIXES)]:
        hint = "copy or download it again; --verify_checkpoint false accepts it"
        raise UserError(f"{where}: {weights[0]}: checksum mismatch: damaged or edited; {hint}")
    return [f"warning: {folder / name} does not match its checksum: it was edited or is damaged" for name in changed]


def _read_sums(folder: Path) -> dict[str, str]:
    if not (folder / SUMS).is_file():
        return {}
    try:
        content = read_bounded(folder / SUMS)
    except ValueError as error:
        raise UserError(f"{folder / SUMS}: {error}; copy it again, or delete it") from error
    sums = {}
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None or not is_inside(match[2]):
            raise UserError(f"{folder / SUMS}: line {number} is damaged; copy it again, or delete it")
        sums[match[2]] = match[1]
    return sums


def _hub_sums(folder: Path) -> dict[str, str]:
    sums = {}
    for path in (folder / HUB_METADATA).rglob("*.metadata"):
        with open_regular(path) as file:
            lines = file.read(_READ_SIZE).decode(errors="replace").splitlines()  # commit, ETag, time
        if len(lines) > 1 and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", lines[1]):
            sums[path.relative_to(folder / HUB_METADATA).as_posix().removesuffix(".metadata")] = lines[1]
    return sums


def _hash(folder: Path, names: Iterable[str], expected: Mapping[str, str] = {}) -> dict[str, str]:
    """Return {name: checksum}: git's SHA-1 if the expected checksum has 40 hex digits, else SHA-256."""

    def checksum(name: str) -> tuple[str, str]:
        is_git = len(expected.get(name, "")) == 40
        with open_regular(folder / name) as file:
            value = hashlib.sha1(b"blob %d\0" % (folder / name).stat().st_size) if is_git else hashlib.sha256()
            while data := file.read(_READ_SIZE):
                value.update(data)  # releases the GIL
        return name, value.hexdigest()

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(checksum, names))
