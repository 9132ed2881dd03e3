"""Checksums for folders that a test creates or changes."""

from pathlib import Path

from toolkit.checkpoints.manifest import COMPLETE, write_manifest
from toolkit.checkpoints.store import file_names
from toolkit.io.checksums import checksum_files


def seal(folder: Path) -> Path:
    """Write the manifest of the files in the folder."""
    write_manifest(folder, checksum_files(folder, [name for name in file_names(folder) if name != COMPLETE]))
    return folder
