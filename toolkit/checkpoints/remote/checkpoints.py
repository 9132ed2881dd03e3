"""S1 atomic-checkpoints on remote storage: a checkpoint there exists once its ``COMPLETE`` does, which is written last.

An object store cannot rename. A checkpoint that replaces one of the same name is therefore uploaded to ``.new-NAME``,
and copied to its place within the storage once it is complete there; until then the old one stays, and from then on
``.new-NAME`` is the checkpoint. A checkpoint is deleted by deleting its ``COMPLETE`` first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from toolkit.checkpoints.manifest import COMPLETE, MAX_SIZE, manifest_bytes
from toolkit.checkpoints.store import BEST, FINAL
from toolkit.io.safe_parse import parse_json
from toolkit.io.storage import Storage

NEW = ".new-"
DAMAGED = "COMPLETE.damaged"
METRICS = "logs/metrics.csv"
_STEP = re.compile(r"step-(\d+)")


class RemoteCheckpoint(NamedTuple):
    """A complete checkpoint on remote storage; the newest is the largest."""

    step: int
    is_final: bool
    is_new: bool
    name: str
    """Of the checkpoint: step-N, final or best."""

    @property
    def folder(self) -> str:
        return f"{NEW}{self.name}" if self.is_new else self.name


def newest_first(storage: Storage) -> Iterator[RemoteCheckpoint]:
    """Yield the complete checkpoints by descending step, ``final`` before others of the same step.

    Raises:
        StorageError: the storage cannot be read.
    """
    found = []
    for folder, is_folder in storage.entries().items():
        name = folder.removeprefix(NEW)
        match = _STEP.fullmatch(name)
        if is_folder and (match or name in (FINAL, BEST)):
            step = int(match[1]) if match else _read_step(storage, folder)
            found.append(RemoteCheckpoint(step, name == FINAL, name != folder, name))
    for checkpoint in sorted(found, reverse=True):
        if is_complete(storage, checkpoint.folder):  # a request each, and only the first ones are needed
            yield checkpoint


def find(storage: Storage, name: str) -> RemoteCheckpoint | None:
    """Return the complete checkpoint of that name, its replacement first; None if there is none."""
    match = _STEP.fullmatch(name)
    for folder in (f"{NEW}{name}", name):
        if is_complete(storage, folder):
            step = int(match[1]) if match else _read_step(storage, folder)
            return RemoteCheckpoint(step, name == FINAL, folder != name, name)
    return None


def first_use(storage: Storage) -> str | None:
    """Return something of a run that is in the folder, complete or not; None if no run has used it."""
    names = storage.entries()
    used = (name for name in names if _STEP.fullmatch(name) or name.removeprefix(NEW) in (FINAL, BEST))
    return next(used, METRICS if "logs" in names and storage.exists(METRICS) else None)


def is_complete(storage: Storage, folder: str) -> bool:
    return storage.exists(f"{folder}/{COMPLETE}")


def upload(storage: Storage, source: Path, name: str, before_complete: Callable[[], None] = lambda: None) -> bool:
    """Upload a checkpoint folder, completely or not at all.

    Args:
        storage: Of the run.
        source: The complete folder, which does not change.
        name: Of the checkpoint.
        before_complete: Called when all files are there, before ``COMPLETE`` is written.

    Returns:
        False if it was there already.

    Raises:
        StorageError: the upload failed; what was there before is unchanged.
        OSError: a file cannot be read.
    """
    manifest = manifest_bytes(source)
    if is_complete(storage, f"{NEW}{name}"):
        _promote(storage, name)
    existing = storage.read(f"{name}/{COMPLETE}", stop=MAX_SIZE + 1)
    if existing == manifest:
        return False
    folder = name if existing is None else f"{NEW}{name}"
    delete(storage, folder)  # the remains of an interrupted upload
    for file in sorted(path for path in source.rglob("*") if path.is_file() and path.name != COMPLETE):
        storage.upload(file, f"{folder}/{file.relative_to(source).as_posix()}")
    before_complete()
    storage.write(f"{folder}/{COMPLETE}", manifest)
    if folder != name:
        _promote(storage, name)
    return True


def finish_replacements(storage: Storage) -> None:
    """Finish or undo the replacements that an earlier process was interrupted in.

    Raises:
        StorageError: a request failed.
    """
    for folder, is_folder in storage.entries().items():
        if is_folder and folder.startswith(NEW):
            if is_complete(storage, folder):
                _promote(storage, folder.removeprefix(NEW))
            else:
                delete(storage, folder)


def _promote(storage: Storage, name: str) -> None:
    """Copy the complete ``.new-NAME`` to its place. After an interruption it is still there."""
    source = f"{NEW}{name}"
    delete(storage, name)
    for file in storage.files(source):
        if file != COMPLETE:
            storage.copy(f"{source}/{file}", f"{name}/{file}")
    storage.copy(f"{source}/{COMPLETE}", f"{name}/{COMPLETE}")
    delete(storage, source)


def delete(storage: Storage, folder: str) -> None:
    """Delete a checkpoint, or what is left of one: ``COMPLETE`` first.

    Raises:
        StorageError: a request failed; the checkpoint is incomplete, or as it was.
    """
    storage.delete(f"{folder}/{COMPLETE}")
    for file in list(storage.files(folder)):
        storage.delete(f"{folder}/{file}")
    storage.delete_empty(folder)


def prune(storage: Storage, keep_last: int, is_over: bool = False) -> None:
    """Delete all but the last ``keep_last`` step checkpoints, and incomplete ones between them; 0 keeps all.

    With ``is_over`` later incomplete ones are deleted too: nobody uploads them any more.

    Raises:
        StorageError: a request failed.
    """
    if not keep_last:
        return
    steps = sorted(((int(m[1]), name) for name in storage.entries() if (m := _STEP.fullmatch(name))), reverse=True)
    n_complete = 0
    for _, name in steps:
        is_kept = n_complete < keep_last
        if is_kept and is_complete(storage, name):
            n_complete += 1
        elif (n_complete or is_over) and not (is_kept and storage.exists(f"{name}/{DAMAGED}")):
            delete(storage, name)


def mark_damaged(storage: Storage, folder: str) -> None:
    """Make a damaged checkpoint incomplete, so that no run resumes from it: its manifest is renamed.

    Raises:
        StorageError: a request failed.
    """
    if is_complete(storage, folder):
        storage.copy(f"{folder}/{COMPLETE}", f"{folder}/{DAMAGED}")
        storage.delete(f"{folder}/{COMPLETE}")


def _read_step(storage: Storage, folder: str) -> int:
    """Return the optimizer step of a checkpoint, from its trainer state; -1 if unknown."""
    try:
        step = parse_json(storage.read(f"{folder}/trainer/meta.json", stop=MAX_SIZE + 1) or b"")["step"]
        return step if type(step) is int else -1
    except (ValueError, KeyError, TypeError):
        return -1
