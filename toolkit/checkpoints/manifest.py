"""S7 verified-bytes: the file ``COMPLETE`` of a checkpoint folder, which lists size and checksums of all other files.

It is written last, so that it also marks a folder as completely written. An empty one (of older versions) only does
that, and folders of LitGPT need none: there is nothing to verify them by.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit.checksums import Checksum, check_entries, checksum_files, find_damage
from toolkit.errors import UserError
from toolkit.ui.files import write_atomic
from toolkit.untrusted import read_json

COMPLETE = "COMPLETE"
FORMAT_VERSION = 1
# Records that people edit, and that no result depends on (only `evaluate` reads the first one).
EDITABLE = ("hyperparameters.yaml", "README.md")
_SHOWN = 5


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing, differs from its checksum or cannot be what was saved."""


def write_manifest(folder: Path, files: Mapping[str, Checksum]) -> None:
    """Write ``COMPLETE``, atomically and to the disk.

    Raises:
        OSError: it cannot be written.
    """
    values = {"format_version": FORMAT_VERSION, "files": dict(sorted(files.items())), "crc32": _crc32(files)}
    text = json.dumps(values, indent=1)
    write_atomic(folder / COMPLETE, f"{text}\n".encode())


def read_manifest(folder: Path) -> dict[str, Checksum] | None:
    """Return the checksums of a folder's files, by their paths in it; None if it has none.

    Raises:
        DamagedCheckpointError: the file is malformed.
        UserError: a newer version of toolkit has written it.
    """
    path = folder / COMPLETE
    try:
        if not path.is_file() or not path.stat().st_size:
            return None
        values = read_json(path)
        files = check_entries(values["files"])
        version = values["format_version"]
        if version == FORMAT_VERSION and values["crc32"] != _crc32(files):
            raise ValueError("its own checksum differs")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise DamagedCheckpointError(f"{path}: damaged: not a manifest ({reason:.200}){_FIX}") from error
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version!r:.20}, this version of toolkit reads {FORMAT_VERSION}")
    return files


def _crc32(files: Mapping[str, Checksum]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"


def checksum_folder(folder: Path, known: Mapping[str, Checksum]) -> dict[str, Checksum]:
    """Return the checksums of all files below the folder; ``known`` ones are taken as they are."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {**known, **checksum_files(folder, sorted(names - known.keys() - {COMPLETE}))}


def replace_listed(folder: Path, name: str, replace: Callable[[], None]) -> None:
    """Replace or add a file of the folder, and its checksum in the manifest, if there is one.

    A crash in between leaves a file without a checksum, never one with a checksum that is not its own.
    """
    files = read_manifest(folder)
    if files is not None and files.pop(name, None) is not None:
        write_manifest(folder, files)
    replace()
    if files is not None:
        write_manifest(folder, files | checksum_files(folder, [name]))


def describe_damage(folder: Path, damage: Mapping[str, str]) -> str:
    """Return one line that names the damaged files, why, and what to do."""
    shown = [f"{name} ({why})" for name, why in list(damage.items())[:_SHOWN]]
    more = f" and {len(damage) - _SHOWN} more" if len(damage) > _SHOWN else ""
    return f"{folder}: damaged: {', '.join(shown)}{more}{_FIX}"


_FIX = "; copy the folder again or take another; --verify_checkpoint false reads files that were edited on purpose"


def require_intact(folder: Path, report: Callable[[str], None], editable: tuple[str, ...] = EDITABLE) -> None:
    """Compare the folder's files with its manifest, in several threads. What they read then is in the page cache.

    Args:
        folder: A checkpoint or model folder.
        report: Is given a note where there is no manifest.
        editable: Files that may differ.

    Raises:
        DamagedCheckpointError: naming the damaged files, or the manifest is malformed.
    """
    files = read_manifest(folder)
    if files is None:
        report(no_manifest(folder))
    elif damage := find_damage(folder, {name: entry for name, entry in files.items() if name not in editable}):
        raise DamagedCheckpointError(describe_damage(folder, damage))


def no_manifest(folder: Path) -> str:
    return f"note: {folder} has no checksums (its {COMPLETE} is missing or empty): not verified"
