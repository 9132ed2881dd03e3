"""Checksums for folders that a test creates or changes."""

from pathlib import Path

from toolkit.checkpoints.manifest import checksum_folder, write_manifest


def seal(folder: Path) -> Path:
    """Write the manifest of the files in the folder."""
    write_manifest(folder, checksum_folder(folder, {}))
    return folder
