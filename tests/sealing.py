"""Checksums for folders that a test has put together or changed."""

from pathlib import Path

from toolkit.checkpoints.manifest import checksum_folder, write_manifest


def seal(folder: Path) -> Path:
    """Write the manifest of the files that are in the folder now."""
    write_manifest(folder, checksum_folder(folder, {}))
    return folder
