"""Download checkpoints, verified against their manifest (S7) and resumable after an interruption.

Files are read in the chunks of the manifest's checksums. Chunks of an interrupted download are kept in
``.download-NAME``. Functions raise ``StorageError`` if a request fails.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path

from toolkit.checkpoints.manifest import (
    COMPLETE,
    TRAINER_STATE,
    DamagedCheckpointError,
    describe_damage,
    manifest_bytes,
    parse_manifest,
)
from toolkit.checkpoints.remote.checkpoints import newest_first
from toolkit.errors import UserError, notice
from toolkit.io.checksums import Checksums, Chunk, crc32_of, iterate_chunks
from toolkit.io.locks import file_lock
from toolkit.io.paths import cache_folder
from toolkit.io.storage import Storage

_THREADS = 4  # each holds one chunk in memory


@cache  # once per process: a run asks for the folder of its base several times
def local_copy(url: str, flag: str, with_trainer: bool = False) -> Path:
    """Download a checkpoint, or a run's newest one, to the user's cache if needed. Return the local folder.

    Error messages name the option ``flag``. ``with_trainer`` also downloads the trainer state, which resuming needs.
    """
    storage = Storage(url, flag)
    target = cache_folder(url, "checkpoints" if with_trainer else "models")
    try:
        with storage.one_line_errors():
            folder = "" if storage.exists(COMPLETE) else find_folder(storage)
            target.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(target.with_name(f"{target.name}.lock")):  # one process of a node downloads, the others wait
                if not has_same_manifest(storage, folder, target):
                    download(storage, folder, target, notice, not with_trainer)
            return target
    except OSError as error:
        raise UserError(f"{flag} {url}: cannot be copied to {target}: {error.strerror or error}") from error


def find_folder(storage: Storage) -> str:
    """Return the folder name of a run's newest checkpoint."""
    newest = next(newest_first(storage), None)
    if newest is not None:
        return newest.folder
    what = f"has no file {COMPLETE}, so it cannot be verified; copy it to a local folder and give that folder"
    raise storage.error(what if storage.entries() else "no such checkpoint or run; check the URL")


def has_same_manifest(storage: Storage, folder: str, local: Path) -> bool:
    """Whether a local folder has the same manifest as a checkpoint on the storage."""
    try:
        return manifest_bytes(local) == storage.read(f"{folder}/{COMPLETE}")
    except OSError:
        return False


def download(
    storage: Storage, folder: str, target: Path, report: Callable[[str], None], model_only: bool = False
) -> None:
    """Download a checkpoint and replace the local folder ``target``.

    Only one process at a time may download to ``target``. ``report`` receives a message with the size. ``model_only``
    omits the trainer state. Raises DamagedCheckpointError if the checkpoint is incomplete or its bytes do not match its
    manifest.
    """
    where, manifest = _location(storage, folder), _read_complete(storage, folder)
    checksums = parse_manifest(manifest, f"{where}/{COMPLETE}")
    partial = target.with_name(f".download-{target.name}")
    partial.mkdir(parents=True, exist_ok=True)
    if manifest != manifest_bytes(partial):  # left by the download of another checkpoint
        shutil.rmtree(partial)
        partial.mkdir()
        (partial / COMPLETE).write_bytes(manifest)
    files = {name: entry for name, entry in checksums.items() if not (model_only and name.startswith(TRAINER_STATE))}
    report(f"downloading {where} ({sum(entry['size'] for entry in files.values()):,} bytes) to {target}")
    damage = fetch_files(storage, folder, files, partial)
    if damage:
        shutil.rmtree(partial)
        raise DamagedCheckpointError(describe_damage(where, damage))
    if target.exists():
        shutil.rmtree(target)
    os.rename(partial, target)


def remote_manifest(storage: Storage, folder: str) -> Checksums:
    """Return {relative path: checksum} of a remote checkpoint."""
    return parse_manifest(_read_complete(storage, folder), f"{_location(storage, folder)}/{COMPLETE}")


def _read_complete(storage: Storage, folder: str) -> bytes:
    if content := storage.read(f"{folder}/{COMPLETE}"):
        return content
    raise DamagedCheckpointError(
        f"{_location(storage, folder)}: incomplete: it has no {COMPLETE}, or an empty one without checksums; "
        "use another checkpoint"
    )


def _location(storage: Storage, folder: str) -> str:
    return f"{storage.url}/{folder}" if folder else storage.url


def fetch_files(storage: Storage, folder: str, files: Checksums, target: Path | None) -> dict[str, str]:
    """Download and verify a checkpoint's files in several threads. Return {damaged file: reason}.

    Files are written to ``target``, and chunks that are intact there are not requested. If ``target`` is None, files
    are only verified.
    """
    damage: dict[str, str] = {}
    if target is not None:
        for name, entry in files.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, entry["size"])

    def fetch(chunk: Chunk) -> None:
        name, start, stop, crc32 = chunk
        if name in damage or start == stop:
            return
        with nullcontext() if target is None else open(target / name, "r+b") as file:
            if file is not None:
                file.seek(start)
                if crc32_of(file.read(stop - start)) == crc32:
                    return
            for _ in range(2):  # the first read may have been damaged in transfer
                content = storage.read(f"{folder}/{name}", start, stop)
                if content is not None and crc32_of(content) == crc32:
                    if file is not None:
                        file.seek(start)
                        file.write(content)
                    return
        damage[name] = "missing" if content is None else chunk.mismatch

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(fetch, iterate_chunks(dict(sorted(files.items())))))
    return damage
