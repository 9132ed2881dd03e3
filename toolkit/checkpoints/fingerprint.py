"""Compute fingerprints of weights. Adapters store the base model's; ranks compare fingerprints before a run."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit.checkpoints.store import WEIGHTS
from toolkit.checkpoints.torch_zip import BinaryFile, FileSlice, zip_entries
from toolkit.checkpoints.weights import load_weights
from toolkit.io.checksums import checksum_files
from toolkit.io.safe_parse import open_regular


def base_fingerprint(folder: Path) -> str:
    """Return the SHA-256 (hex) of the weights' names, shapes, dtypes and CRC-32 checksums.

    The checksums come from the zip directories, without reading the weights. The fingerprint depends on the layout (one
    file or shards), but not on the path.
    """
    path = folder / WEIGHTS
    return _hash(_shard_lines(path) if path.is_dir() else _file_lines(path))


def peft_fingerprint(folder: str | Path) -> str:
    """Return the checksums of the ``adapter_*`` files of a peft folder."""
    return str(checksum_files(Path(folder), sorted(path.name for path in Path(folder).glob("adapter_*"))))


def _hash(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _file_lines(path: Path) -> Iterator[str]:
    for name, tensor in load_weights(path.parent).items():  # memory-mapped, not read
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}"
    with open_regular(path) as file:
        yield from _checksums(file, path)


def _shard_lines(path: Path) -> Iterator[str]:
    from toolkit.checkpoints.run.shard_metadata import read_metadata, stored_tensors  # slow to import (1 s)

    metadata = read_metadata(path)
    for name, tensor in stored_tensors(metadata).items():
        yield f"{name} {tuple(tensor.size)} {tensor.properties.dtype}"
    for index, chunk in sorted(metadata.storage_data.items(), key=lambda item: (item[0].fqn, item[0].offset or ())):
        with open_regular(path / chunk.relative_path) as file:
            sums = _checksums(FileSlice(file, chunk.offset, chunk.length), path)
            yield f"{index.fqn} {tuple(index.offset or ())} {' '.join(sums)}"


def _checksums(file: BinaryFile, path: Path) -> list[str]:
    """Return a line (name, size, CRC-32) per zip entry below ``data/``, where torch stores tensor data."""
    entries = [(info.filename.partition("/")[2], info) for info in zip_entries(file, path)]
    return [f"{name} {info.file_size} {info.CRC:08x}" for name, info in entries if name.startswith("data/")]
