"""S1 atomic-checkpoints on remote storage: ``COMPLETE`` is written last and marks a checkpoint as complete.

Object stores cannot rename. A replacement of checkpoint NAME is uploaded to ``.new-NAME``. Once complete, it counts as
NAME and is copied there within the storage. Deletion starts with ``COMPLETE``. All functions raise ``StorageError`` if
a request fails.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from toolkit.checkpoints.manifest import COMPLETE, manifest_bytes, parse_manifest
from toolkit.checkpoints.store import FINAL, file_names, is_checkpoint_name, step_in_meta, step_in_name
from toolkit.io.storage import Storage, StorageError

NEW = ".new-"
DAMAGED = "COMPLETE.damaged"
METRICS = "logs/metrics.csv"


class RemoteCheckpoint(NamedTuple):
    """A checkpoint on remote storage. Newer ones compare greater."""

    step: int
    is_final: bool
    is_new: bool
    name: str
    """step-N, final or best."""

    @property
    def folder(self) -> str:
        return f"{NEW}{self.name}" if self.is_new else self.name


def newest_first(storage: Storage) -> Iterator[RemoteCheckpoint]:
    """Yield the complete checkpoints by descending step, ``final`` before others of the same step."""
    folders = [name for name, is_folder in storage.entries().items() if is_folder and _is_checkpoint(name)]
    for checkpoint in sorted((_read_checkpoint(storage, folder) for folder in folders), reverse=True):
        if is_complete(storage, checkpoint.folder):  # one request each, and callers need only the first few
            yield checkpoint


def find(storage: Storage, name: str) -> RemoteCheckpoint | None:
    """Return the complete checkpoint ``name``, preferring a complete replacement; None if there is none."""
    complete = (folder for folder in (f"{NEW}{name}", name) if is_complete(storage, folder))
    return next((_read_checkpoint(storage, folder) for folder in complete), None)


def find_existing_output(storage: Storage) -> str | None:
    """Return a checkpoint (complete or not) or metrics file in the folder; None if no run has used it."""
    names = storage.entries()
    used = filter(_is_checkpoint, names)
    return next(used, METRICS if "logs" in names and storage.exists(METRICS) else None)


def _is_checkpoint(folder: str) -> bool:
    return is_checkpoint_name(folder.removeprefix(NEW))


def _read_checkpoint(storage: Storage, folder: str) -> RemoteCheckpoint:
    name = folder.removeprefix(NEW)
    if (step := step_in_name(name)) is None:
        step = step_in_meta(storage.read(f"{folder}/trainer/meta.json") or b"")
    return RemoteCheckpoint(step, name == FINAL, name != folder, name)


def is_complete(storage: Storage, folder: str) -> bool:
    return storage.exists(f"{folder}/{COMPLETE}")


def upload(
    storage: Storage,
    source: Path,
    name: str,
    before_complete: Callable[[], None] = lambda: None,
    is_canceled: Callable[[], bool] | None = None,
) -> bool:
    """Upload a complete checkpoint folder atomically. Return False if the storage already has it.

    With ``is_canceled``, waits until the storage has the files that ``source`` lacks, with their sizes: other machines
    upload them, see :func:`upload_part`. ``before_complete`` is called when all other files are there, before
    ``COMPLETE`` is written.
    """
    manifest = manifest_bytes(source)
    if is_complete(storage, f"{NEW}{name}"):
        _promote(storage, name)
    existing = storage.read(f"{name}/{COMPLETE}")
    if existing == manifest:
        return False
    folder = name if existing is None else f"{NEW}{name}"
    delete(storage, folder)  # left by an interrupted upload
    request = _part_request(folder, manifest)
    if is_canceled is not None:
        storage.write(request, b"")
    _upload_files(storage, source, folder)
    if is_canceled is not None:
        expected = {file: entry["size"] for file, entry in parse_manifest(manifest, source).items()}
        while missing := expected.items() - storage.files(folder).items():
            if is_canceled():
                raise StorageError(f"{min(missing)[0]} was not uploaded by the machine that wrote it")
        storage.delete(request)
    before_complete()
    storage.write(f"{folder}/{COMPLETE}", manifest)
    if folder != name:
        _promote(storage, name)
    return True


def upload_part(storage: Storage, source: Path, name: str, is_canceled: Callable[[], bool]) -> None:
    """Upload this machine's files of a checkpoint after :func:`upload` on rank 0 has requested them.

    The request is an object in the checkpoint's folder: rank 0 chooses the folder and deletes what an earlier upload
    left there. ``is_canceled`` waits a moment and returns whether to give up.
    """
    if file_names(source) == [COMPLETE]:
        return
    manifest = manifest_bytes(source)
    folders = (name, f"{NEW}{name}")
    while (folder := next((f for f in folders if storage.exists(_part_request(f, manifest))), None)) is None:
        if is_canceled():
            return
    _upload_files(storage, source, folder)


def _part_request(folder: str, manifest: bytes) -> str:
    """Return the name of the object that asks for the parts of a checkpoint: unique to this save."""
    return f"{folder}/.parts-{digest(manifest)}"


def digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:16]


def _upload_files(storage: Storage, source: Path, folder: str) -> None:
    for name in file_names(source):
        if name != COMPLETE:
            storage.upload(source / name, f"{folder}/{name}")


def finish_replacements(storage: Storage) -> None:
    """Complete or delete replacements that an earlier process left unfinished."""
    for folder, is_folder in storage.entries().items():
        if is_folder and folder.startswith(NEW):
            if is_complete(storage, folder):
                _promote(storage, folder.removeprefix(NEW))
            else:
                delete(storage, folder)


def _promote(storage: Storage, name: str) -> None:
    """Copy the complete ``.new-NAME`` to NAME; an interruption leaves ``.new-NAME`` in place."""
    source = f"{NEW}{name}"
    delete(storage, name)
    for file in storage.files(source):
        if file != COMPLETE:
            storage.copy(f"{source}/{file}", f"{name}/{file}")
    storage.copy(f"{source}/{COMPLETE}", f"{name}/{COMPLETE}")
    delete(storage, source)


def delete(storage: Storage, folder: str) -> None:
    """Delete a checkpoint, complete or not, starting with ``COMPLETE``."""
    storage.delete(f"{folder}/{COMPLETE}")
    storage.delete_folder(folder)


def prune(storage: Storage, keep_last: int, is_over: bool = False) -> None:
    """Delete all but the newest ``keep_last`` step checkpoints, and incomplete ones older than the newest; 0 keeps all.

    If ``is_over`` (the run has ended), delete incomplete checkpoints of any age. Checkpoints marked as damaged are kept
    until there are ``keep_last`` newer ones.
    """
    if not (keep_last or is_over):
        return
    named = ((step_in_name(name), name) for name in storage.entries())
    steps = sorted(((step, name) for step, name in named if step is not None), reverse=True)
    n_complete = 0
    for _, name in steps:
        is_kept = not keep_last or n_complete < keep_last
        if is_kept and is_complete(storage, name):
            n_complete += 1
        elif (n_complete or is_over) and not (is_kept and storage.exists(f"{name}/{DAMAGED}")):
            delete(storage, name)


def mark_damaged(storage: Storage, folder: str) -> None:
    """Mark a checkpoint as damaged by renaming its manifest. It is then incomplete, so no run resumes from it."""
    if is_complete(storage, folder):
        storage.copy(f"{folder}/{COMPLETE}", f"{folder}/{DAMAGED}")
        storage.delete(f"{folder}/{COMPLETE}")
