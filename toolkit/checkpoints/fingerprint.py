"""Compute fingerprints of weights. Adapters store the base model's; ranks compare fingerprints before a run."""

import hashlib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit.checkpoints.store import ADAPTERS, WEIGHTS
from toolkit.checkpoints.torch_zip import DAMAGED, BinaryFile, FileSlice
from toolkit.checkpoints.weights import load_weights
from toolkit.errors import UserError
from toolkit.io.safe_parse import open_regular


def base_fingerprint(folder: Path) -> str:
    """Return the SHA-256 (hex) of the weights' names, shapes, dtypes and CRC-32 checksums.

    The checksums come from the zip directories, without reading the weights. The fingerprint depends on the layout (one
    file or shards), but not on the path.
    """
    path = folder / WEIGHTS
    return _hash(_shard_lines(path) if path.is_dir() else _file_lines(path))


def resume_fingerprint(folder: Path) -> str:
    """Return the SHA-256 (hex) of weights and trainer state.

    As in :func:`base_fingerprint`, tensor data is represented by CRC-32 checksums.
    """
    return _hash(_resume_lines(folder))


def peft_fingerprint(folder: str | Path) -> str:
    """Return the SHA-256 (hex) of the ``adapter_*`` files of a peft folder."""
    return _hash(_bytes_line(path) for path in sorted(Path(folder).glob("adapter_*")))


def _hash(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _resume_lines(folder: Path) -> Iterator[str]:
    adapters, trainer = folder / ADAPTERS, folder / "trainer"
    if adapters.is_file():
        yield from _zip_lines(adapters, "")
    else:
        yield base_fingerprint(folder)
    yield _bytes_line(trainer / "meta.json")
    yield from _zip_lines(trainer / "state.pth", "")  # all entries: numbers are stored outside data/
    if (trainer / "optimizer").is_dir():
        yield from _shard_lines(trainer / "optimizer")


def _bytes_line(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    return f"{path.name} {digest.hexdigest()}"


def _zip_lines(path: Path, prefix: str) -> list[str]:
    try:
        with open_regular(path) as file:
            return _checksums(file, path, prefix)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def _file_lines(path: Path) -> Iterator[str]:
    for name, tensor in load_weights(path.parent).items():  # memory-mapped, not read
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}"
    yield from _zip_lines(path, "data/")


def _shard_lines(path: Path) -> Iterator[str]:
    from toolkit.checkpoints.run.shard_metadata import read_metadata, stored_tensors  # slow to import (1 s)

    metadata = read_metadata(path)
    for name, tensor in stored_tensors(metadata).items():
        yield f"{name} {tuple(tensor.size)} {tensor.properties.dtype}"
    for index, chunk in sorted(metadata.storage_data.items(), key=lambda item: (item[0].fqn, item[0].offset or ())):
        with open_regular(path / chunk.relative_path) as file:
            sums = _checksums(FileSlice(file, chunk.offset, chunk.length), path)
            yield f"{index.fqn} {tuple(index.offset or ())} {' '.join(sums)}"


def _checksums(file: BinaryFile, path: Path, prefix: str = "data/") -> list[str]:
    """Return a line (name, size, CRC-32) per zip entry below ``prefix``. torch stores tensor data in ``data/``."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [(info.filename.partition("/")[2], info) for info in archive.infolist()]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: {DAMAGED}") from error
    return [f"{name} {info.file_size} {info.CRC:08x}" for name, info in entries if name.startswith(prefix)]
