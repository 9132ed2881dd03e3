"""S1 atomic-checkpoints: create folders atomically, and list a run's checkpoints.

Files and folders named ``.tmp-*`` are being written or deleted and are never listed; see :mod:`toolkit.io.tempfiles`.
"""

import errno
import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from toolkit.checkpoints.lock import LOCK, detect_lost_lock
from toolkit.checkpoints.manifest import COMPLETE, replace_in_manifest, write_manifest
from toolkit.errors import UserError
from toolkit.io.atomic import disk_full_reason, sync, sync_tree
from toolkit.io.checksums import Checksum, Checksums, checksum_files
from toolkit.io.safe_parse import parse_json, read_bounded
from toolkit.io.tempfiles import TMP, remove, sweep, temporary_path

FINAL, BEST = "final", "best"
STOP, SAVE_NOW = "STOP", "SAVE_NOW"  # requests to a run, see toolkit/training/control_files.py
ROLLOUTS = "rollouts"  # what steps trained on, deleted with their checkpoints
PARTS = ".parts"  # subfolder for parts of checkpoints on the disks of several machines
WEIGHTS = "lit_model.pth"
ADAPTERS = "lit_model.pth.lora"
MTP = "mtp.safetensors"  # the base model's weights of multi-token prediction, which are not trained
_OLD = ".old-"
_STEP = re.compile(r"step-(\d+)")
# Only the process that holds the lock of a run's folder writes such names, so existing ones are stale.
_UNFINISHED = re.compile(rf"{re.escape(TMP)}(.+-)?({re.escape(_OLD)})?(step-\d+|{FINAL}|{BEST})(-\d+)?")
_BROKEN = (errno.EIO, errno.EROFS)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def begin_checkpoint(folder: Path) -> Path:
    """Create the temporary folder of a checkpoint, and clean up after earlier runs (S1).

    Only one process may write to a run's folder at a time. An existing checkpoint of that name stays readable until
    :func:`commit_checkpoint` replaces it.
    """
    detect_lost_lock(folder.parent)
    for replaced in folder.parent.glob(f"{_OLD}*"):
        _restore_or_delete(replaced)
    remove(path for path in folder.parent.glob(f"{TMP}*") if _UNFINISHED.fullmatch(path.name))
    return _begin_folder(folder, "--out_dir")


def commit_checkpoint(tmp: Path, folder: Path, files: Mapping[str, Checksum]) -> None:
    """Write the manifest into ``tmp``, from :func:`begin_checkpoint`, and rename ``tmp`` to ``folder``.

    ``files`` is {relative path: checksum} of files in ``tmp``. Missing checksums are computed.
    """
    was_deleted = detect_lost_lock(folder.parent)
    others = [name for name in file_names(tmp) if name not in files]
    write_manifest(tmp, {**files, **sync_and_checksum(tmp, others)})
    sync_tree(tmp)
    _rename_into_place(tmp, folder)
    if was_deleted:
        raise UserError(
            f"--out_dir {folder.parent}: was deleted during the run ({LOCK} is missing); {folder.name} is saved "
            "there; resume with --resume auto"
        )


def write_model_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Like :func:`write_folder`, with a manifest of all files."""

    def write_and_list(tmp: Path) -> None:
        write(tmp)
        write_manifest(tmp, sync_and_checksum(tmp, file_names(tmp)))

    write_folder(folder, write_and_list)


def file_names(folder: Path) -> list[str]:
    """Return the paths of all files below the folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def sync_and_checksum(folder: Path, names: Collection[str]) -> Checksums:
    """Sync files and their folders to disk. Return {name: checksum}."""
    paths = [folder / name for name in names]

    def sync_all() -> None:
        for path in [*paths, *sorted({path.parent for path in paths})]:
            sync(path)

    with ThreadPoolExecutor(1) as pool:  # overlaps disk and CPU work
        synced = pool.submit(sync_all)
        files = checksum_files(folder, names)
        synced.result()  # the manifest must not reach the disk before the files that it lists
    return files


def write_folder(folder: Path, write: Callable[[Path], object], flag: str = "out_dir") -> None:
    """Write a folder atomically: ``write`` fills a temporary folder, which is synced to disk and renamed.

    Error messages name the option ``flag``.
    """
    tmp = _begin_folder(folder, flag)
    with delete_on_error(tmp, folder, flag):
        write(tmp)
        sync_tree(tmp)
        _rename_into_place(tmp, folder)


def _begin_folder(folder: Path, flag: str) -> Path:
    """Create the temporary folder of ``folder`` in the same parent."""
    tmp = temporary_path(folder)
    sweep(folder.parent)
    remove([tmp])  # left by an earlier process with the same id
    with delete_on_error(tmp, folder, flag):
        folder.parent.mkdir(parents=True, exist_ok=True)
        tmp.mkdir()
    return tmp


@contextmanager
def delete_on_error(tmp: Path, folder: Path, flag: str = "--out_dir") -> Iterator[None]:
    """Delete ``tmp``, which is to become ``folder`` (or a file), if the block fails."""
    try:
        yield
    except BaseException as error:
        message = _describe_write_error(error, tmp, folder)  # before deleting tmp, whose size it reports
        discard(tmp)
        if message is not None:
            value = folder.parent if flag in ("--out_dir", "checkpoint_dir") else folder
            raise UserError(f"{flag} {value}: {message}") from error
        raise


def discard(tmp: Path) -> None:
    """Delete a temporary file or folder.

    It is renamed first, so that a thread still writing to it cannot publish the rest.
    """
    with suppress(OSError):
        _delete_atomically(tmp)


def require_new_folder(out_dir: Path) -> None:
    """Raise UserError unless ``out_dir`` is an empty folder or does not exist."""
    try:
        is_file = out_dir.exists() and not out_dir.is_dir()
        is_used = is_file or (out_dir.exists() and any(out_dir.iterdir()))
    except OSError as error:  # such as no permission, or too long a name
        raise UserError(f"out_dir {out_dir}: {error.strerror}; choose another folder") from error
    if is_used:
        reason = "is a file" if is_file else "already exists and is not empty"
        raise UserError(f"out_dir {out_dir}: {reason}; give a new folder")


def write_file(path: Path, write: Callable[[Path], object], flag: str) -> None:
    """Write one file atomically into an existing folder, and add it to the folder's manifest.

    ``write`` receives a temporary path. Error messages name the option ``flag``.
    """
    tmp = temporary_path(path)
    sweep(path.parent)
    with delete_on_error(tmp, path, flag):
        write(tmp)
        sync(tmp)
        replace_in_manifest(path.parent, path.name, lambda: os.replace(tmp, path))
        sync(path.parent)


def is_complete(folder: Path) -> bool:
    """Whether the folder is a completely written checkpoint."""
    return (folder / COMPLETE).is_file()


def newest(out_dir: Path) -> Path | None:
    """Return the complete checkpoint with the highest step; ``final`` wins a tie."""
    return next(iter(newest_first(out_dir)), None)


def newest_first(out_dir: Path) -> list[Path]:
    """Return all complete checkpoints, by descending step, ``final`` before others of the same step."""

    def sort_key(checkpoint: tuple[str, Path]) -> tuple[float, bool, Path]:
        name, path = checkpoint
        step: float = step_of(path)
        if step < 0 and name == FINAL and (path / "trainer").exists():
            step = math.inf  # damaged trainer state: list it first, so that the damage is reported
        return step, name == FINAL, path

    return [path for _, path in sorted(complete_checkpoints(out_dir), key=sort_key, reverse=True)]


def rename_damaged(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is no longer listed, and return its new path."""
    name = f"damaged-{folder.name.removeprefix(_OLD)}"
    targets = (folder.with_name(f"{name}-{number}" if number else name) for number in itertools.count())
    return folder.rename(next(target for target in targets if not os.path.lexists(target)))


def step_of(folder: Path) -> int:
    """Return the optimizer step of a checkpoint, from its name or else its trainer state; -1 if unknown."""
    if (named := step_in_name(folder.name)) is not None:
        return named
    try:
        return step_in_meta(read_bounded(folder / "trainer" / "meta.json"))
    except (OSError, ValueError):
        return -1


def step_in_meta(content: bytes) -> int:
    """Return the optimizer step in the content of ``trainer/meta.json``; -1 if unknown."""
    try:
        step = parse_json(content)["step"]
        return step if type(step) is int else -1
    except (ValueError, KeyError, TypeError):
        return -1


def step_in_name(name: str) -> int | None:
    """Return N if a folder is named step-N, else None."""
    match = _STEP.fullmatch(name.removeprefix(_OLD))
    return int(match[1]) if match else None


def is_checkpoint_name(name: str) -> bool:
    return name in (FINAL, BEST) or _STEP.fullmatch(name) is not None


def prune(out_dir: Path, keep_last: int) -> None:
    """Delete all but the last ``keep_last`` step checkpoints; 0 keeps all. Call it after the newest is complete."""
    steps = [folder for folder in newest_first(out_dir) if step_in_name(folder.name) is not None]
    for folder in reversed(steps[keep_last:] if keep_last else []):
        _delete_atomically(folder)


def checkpoint_folders(out_dir: Path) -> Iterator[Path]:
    """Yield folders that are named like a checkpoint, complete or not."""
    if out_dir.is_dir():
        yield from sorted(path for path in out_dir.iterdir() if path.is_dir() and is_checkpoint_name(path.name))


def complete_checkpoints(out_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the complete checkpoints, including one whose replacement was interrupted."""
    for path in checkpoint_folders(out_dir):
        if is_complete(path):
            yield path.name, path
    for path in out_dir.glob(f"{_OLD}*"):
        name = path.name.removeprefix(_OLD)
        if is_complete(path) and not (out_dir / name).exists():
            yield name, path


def _rename_into_place(tmp: Path, folder: Path) -> None:
    """Rename ``tmp`` to ``folder``; an existing folder is absent only between two renames."""
    replaced = folder.with_name(f"{_OLD}{folder.name}")
    if folder.exists():
        os.rename(folder, replaced)
    try:
        os.rename(tmp, folder)
        sync(folder.parent)
    finally:
        if replaced.exists():
            _restore_or_delete(replaced)


def _restore_or_delete(replaced: Path) -> None:
    folder = replaced.with_name(replaced.name.removeprefix(_OLD))
    if folder.exists():
        _delete_atomically(replaced)
    else:
        os.rename(replaced, folder)


def _delete_atomically(folder: Path) -> None:
    """Rename the folder before deleting it, so that an interruption leaves no partial checkpoint."""
    tmp = temporary_path(folder)
    os.rename(folder, tmp)
    remove([tmp])


def _describe_write_error(error: BaseException, tmp: Path, folder: Path) -> str | None:
    """Return the reason and a fix if ``error`` means that the disk is full or the folder not writable, else None."""
    reason = disk_full_reason(error)
    if reason is not None:
        previous, parent = newest(folder.parent), folder.parent
        disk = os.statvfs(parent) if parent.exists() else None
        free = f"{disk.f_bavail * disk.f_frsize if disk else 0:,} bytes free"
        if disk and disk.f_files and not disk.f_favail:
            free = "no inodes free: delete files, whatever their size"
        return (
            f"{reason}: stopped after {_size(tmp):,} bytes of {folder.name} with {free}"
            + (f"; {previous.name} ({_size(previous):,} bytes) is kept" if previous else "")
            + "; free some space or choose another folder"
        )
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, OSError):  # from ShardedSave
        return f"{error}; choose a folder that all ranks can write to"
    if not isinstance(error, OSError):
        return None
    path = Path(str(error.filename or tmp))  # fsync and write name no file
    if error.errno in _BROKEN and folder.parent in path.parents:
        return f"{error.strerror} while writing {folder.name}; check the disk, or choose another folder"
    # creating tmp or one of its parents may fail with any errno (/proc reports ENOENT)
    is_creation_error = error.filename is not None and path in (tmp, *tmp.parents)
    if (error.errno in _UNWRITABLE or is_creation_error) and not os.path.exists(tmp):
        return f"{error.strerror}; choose another folder"
    return None


def _size(folder: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder."""
    if folder.is_file():
        return folder.stat().st_size
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
