"""S7 verified-bytes: the manifest ``COMPLETE`` of a checkpoint folder lists size and checksums of all other files.

It is written last and also marks the folder as complete. Folders with an empty manifest (older versions) or without one
(LitGPT) cannot be verified.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit.errors import UserError, join_first, notice, one_line
from toolkit.io.atomic import write_atomic
from toolkit.io.checksums import Checksum, Checksums, check_entries, checksum_files, find_damage
from toolkit.io.safe_parse import MAX_BYTES, open_regular, parse_json

COMPLETE = "COMPLETE"
FORMAT_VERSION = 1
MAX_SIZE = MAX_BYTES["JSON"]
# Files that users may edit and that do not affect results (only `evaluate` reads the first one).
EDITABLE = ("hyperparameters.yaml", "README.md")
TRAINER_STATE = "trainer/"  # two thirds of the bytes; not part of the model


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing, does not match its checksum or contains NaN or Inf."""


def write_manifest(folder: Path, files: Mapping[str, Checksum]) -> None:
    """Write ``COMPLETE`` atomically and sync it to disk."""
    values = {"format_version": FORMAT_VERSION, "files": dict(sorted(files.items())), "crc32": _crc32(files)}
    text = json.dumps(values, indent=1)
    write_atomic(folder / COMPLETE, f"{text}\n".encode())


def read_manifest(folder: Path) -> Checksums | None:
    """Return {relative path: checksum} from a folder's manifest; None if it is missing or empty."""
    path = folder / COMPLETE
    try:
        content = manifest_bytes(folder)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}; check its permissions and the disk"
        raise DamagedCheckpointError(f"{path}: {reason}") from error
    return parse_manifest(content, path) if content else None


def manifest_bytes(folder: Path) -> bytes:
    """Return the content of ``COMPLETE``, at most ``MAX_SIZE + 1`` bytes; empty if missing."""
    path = folder / COMPLETE
    if not path.is_file():
        return b""
    with open_regular(path) as file:
        return file.read(MAX_SIZE + 1)


def parse_manifest(content: bytes, path: Path | str) -> Checksums:
    """Parse a manifest into {relative path: checksum}. Error messages name ``path``."""
    try:
        if len(content) > MAX_SIZE:
            raise ValueError(f"larger than {MAX_SIZE:,} bytes")
        values = parse_json(content)
        files = check_entries(values["files"])
        version = values["format_version"]
        if version == FORMAT_VERSION and values["crc32"] != _crc32(files):
            raise ValueError("checksum mismatch")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path}: damaged: not a manifest ({one_line(error):.200}){_FIX}") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {version!r:.20}, this version of toolkit reads {FORMAT_VERSION}; upgrade toolkit"
        )
    return files


def _crc32(files: Mapping[str, Checksum]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"


def replace_in_manifest(folder: Path, name: str, replace: Callable[[], None]) -> None:
    """Call ``replace`` to write a file, and update its checksum in the manifest, if there is one.

    A crash in between may leave the file without a checksum, never with a wrong one.
    """
    files = read_manifest(folder)
    if files is not None and files.pop(name, None) is not None:
        write_manifest(folder, files)
    replace()
    if files is not None:
        write_manifest(folder, files | checksum_files(folder, [name]))


def describe_damage(folder: Path | str, damaged_files: Mapping[str, str]) -> str:
    """Return a one-line message with {damaged file: reason} and a suggested fix."""
    return f"{folder}: damaged: {join_first([f'{name} ({why})' for name, why in damaged_files.items()])}{_FIX}"


_FIX = (
    "; copy the folder again, use another checkpoint, or restart the run; --verify_checkpoint false accepts files that "
    "were edited on purpose"
)


def require_intact(folder: Path, editable: tuple[str, ...] = EDITABLE) -> None:
    """Verify a folder's files against its manifest. Raise DamagedCheckpointError if one differs.

    Prints a note if there is no manifest. Paths that start with one of ``editable`` are not verified.
    Files are read in several threads, which also fills the page cache.
    """
    files = read_manifest(folder)
    if files is None:
        notice(missing_manifest_note(folder))
    elif damage := find_damage(folder, {name: entry for name, entry in files.items() if not name.startswith(editable)}):
        raise DamagedCheckpointError(describe_damage(folder, damage))


def missing_manifest_note(folder: Path) -> str:
    return f"note: {folder} has no checksums (its {COMPLETE} is missing or empty): not verified"
