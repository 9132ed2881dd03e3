"""S1 and S2 on disk: folders that appear whole or not at all, and which of them a run goes on from.

Every name that begins with ``.tmp-`` is unfinished or on its way out: nothing lists it, see :mod:`toolkit.leftovers`.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from toolkit.checkpoints.lock import LOCK, is_removed
from toolkit.checkpoints.manifest import COMPLETE, checksum_folder, replace_listed, write_manifest
from toolkit.checksums import Checksum
from toolkit.errors import UserError
from toolkit.leftovers import TMP, remove, sweep, temporary_path
from toolkit.untrusted import read_json

FINAL, BEST = "final", "best"
WEIGHTS = "lit_model.pth"
_OLD = ".old-"
_STEP = re.compile(r"step-(\d+)")
# In a run's folder only the process that has its lock writes such names, so that none is a live process's.
_UNFINISHED = re.compile(rf"{re.escape(TMP)}(.+-)?({re.escape(_OLD)})?(step-\d+|{FINAL}|{BEST})(-\d+)?")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OUT_OF_REACH = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def write_checkpoint(folder: Path, write: Callable[[Path], Mapping[str, Checksum] | None]) -> None:
    """Write a checkpoint folder, whole or not at all (S1). One process writes to a run's folder at a time.

    Args:
        folder: Where it appears. A folder of that name is replaced, and stays findable until the new one is whole.
        write: Fills the (empty, temporary) folder that it is given; may return checksums of files, by their paths in
            it, that other processes wrote and have computed already.

    Raises:
        UserError: the disk is full; the temporary folder is gone and earlier checkpoints are as they were. Or the
            run's folder was removed meanwhile; the checkpoint is written all the same, unless another run has begun.
    """
    was_removed = is_removed(folder.parent)
    for aside in folder.parent.glob(f"{_OLD}*"):
        _put_back_or_delete(aside)
    remove(path for path in folder.parent.glob(f"{TMP}*") if _UNFINISHED.fullmatch(path.name))
    write_model_folder(folder, write, flag="--out_dir")
    if was_removed:
        raise UserError(
            f"--out_dir {folder.parent}: was removed during the run ({LOCK} is missing); {folder.name} was still "
            "saved there, continue from it with --resume auto"
        )


def write_model_folder(folder: Path, write: Callable[[Path], Mapping[str, Checksum] | None], flag: str) -> None:
    """As :func:`write_folder`, with a manifest of all files (see :func:`write_checkpoint` for ``write``)."""

    def write_and_list(tmp: Path) -> None:
        known = write(tmp) or {}
        with ThreadPoolExecutor(1) as pool:  # the disk and the processor work at the same time
            synced = pool.submit(_sync_tree, tmp)
            files = checksum_folder(tmp, known)
            synced.result()  # the manifest must not reach the disk before what it lists
        write_manifest(tmp, files)

    write_folder(folder, write_and_list, flag)


def write_folder(folder: Path, write: Callable[[Path], None], flag: str) -> None:
    """Write a folder, whole or not at all: into a temporary folder beside it, to the disk, then one rename.

    ``write`` fills the folder that it is given; ``flag`` is the option to name when that fails.

    Raises:
        UserError: the disk is full, or the folder cannot be made; nothing is left behind.
    """
    tmp = temporary_path(folder)
    sweep(folder.parent)
    remove([tmp])  # of a former process with this one's id
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tmp.mkdir()
        write(tmp)
        _sync_tree(tmp)
        _move_in(tmp, folder)
    except BaseException as error:
        message = _explain(error, tmp, folder)  # counts what was written, so before it is deleted
        shutil.rmtree(tmp, ignore_errors=True)
        if message is not None:
            raise UserError(f"{flag} {folder.parent if flag == '--out_dir' else folder}: {message}") from error
        raise


def require_new_folder(out_dir: Path) -> None:
    """Refuse to write where something lies already.

    Raises:
        UserError: out_dir is a file, a folder that is not empty, or out of reach.
    """
    try:
        is_file = out_dir.exists() and not out_dir.is_dir()
        is_used = is_file or out_dir.exists() and any(out_dir.iterdir())
    except OSError as error:  # no permission to look, a name that is too long
        raise UserError(f"out_dir {out_dir}: {error.strerror}; choose another folder") from error
    if is_used:
        what = "is a file" if is_file else "already there and not empty"
        raise UserError(f"out_dir {out_dir}: {what}; give a new folder")


def write_file(path: Path, write: Callable[[Path], None], flag: str) -> None:
    """Write one file into a folder that is there, whole or not at all; the folder's manifest lists it then.

    ``write`` is given another name for it.

    Raises:
        UserError: naming ``flag``: the disk is full, or the folder cannot be written; nothing is left behind.
    """
    tmp = temporary_path(path)
    sweep(path.parent)
    try:
        write(tmp)
        _sync(tmp)
        replace_listed(path.parent, path.name, lambda: os.replace(tmp, path))
        _sync(path.parent)
    except BaseException as error:
        message = _explain(error, tmp, path)
        tmp.unlink(missing_ok=True)
        if message is not None:
            raise UserError(f"{flag} {path.parent}: {message}") from error
        raise


def is_complete(folder: Path) -> bool:
    """Whether the folder is a checkpoint that was written to its end."""
    return (folder / COMPLETE).is_file()


def step_folders(out_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the complete ``step-*`` checkpoints of a run, the oldest first."""
    found = ((_STEP.fullmatch(name), path) for name, path in _complete_folders(out_dir))
    return sorted((int(match[1]), path) for match, path in found if match)


def newest(out_dir: Path) -> Path | None:
    """Return the complete checkpoint of the highest step; ``final`` where it is as far as a step's."""
    return next(iter(newest_first(out_dir)), None)


def newest_first(out_dir: Path) -> list[Path]:
    """Return all complete checkpoints, by falling step, ``final`` before others of its step."""

    def age(name: str, path: Path) -> tuple[float, bool, Path]:
        step: float = step_of(path)
        if step < 0 and name == FINAL and (path / "trainer").exists():
            step = math.inf  # its trainer state is damaged: the first to look at, not one to overlook
        return step, name == FINAL, path

    return [path for *_, path in sorted((age(name, path) for name, path in _complete_folders(out_dir)), reverse=True)]


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is no checkpoint of its run any more, and return its new path."""
    for number in itertools.count():
        aside = folder.with_name(f"damaged-{folder.name.removeprefix(_OLD)}" + (f"-{number}" if number else ""))
        if not os.path.lexists(aside):
            os.rename(folder, aside)
            return aside
    raise AssertionError


def has_best(out_dir: Path) -> bool:
    """Whether the run has a complete checkpoint of its best validation."""
    return any(name == BEST for name, _ in _complete_folders(out_dir))


def step_of(folder: Path) -> int:
    """Return the optimizer step of a checkpoint: that of its name, else that of its trainer state; -1 if unknown."""
    if (named := step_in_name(folder)) is not None:
        return named
    try:
        step = read_json(folder / "trainer" / "meta.json")["step"]
        return step if type(step) is int else -1
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def step_in_name(folder: Path) -> int | None:
    """Return N of a folder named step-N, else None."""
    match = _STEP.fullmatch(folder.name.removeprefix(_OLD))
    return int(match[1]) if match else None


def prune(out_dir: Path, keep_last: int) -> None:
    """Delete all but the last ``keep_last`` step checkpoints; 0 keeps all. Call it when the newest is whole."""
    folders = [folder for _, folder in step_folders(out_dir)]
    for folder in folders[:-keep_last] if keep_last else []:
        # Out of sight first: killed here, what is left of it is not taken for a checkpoint.
        gone = temporary_path(folder)
        os.rename(folder, gone)
        remove([gone])


def resolve_resume(resume: bool | str, out_dir: Path) -> Path | None:
    """Return the checkpoint folder that a run goes on from, or None for a fresh start.

    Args:
        resume: False; "auto": the newest checkpoint of out_dir, if there is one; True: the same, but there must be
            one; else a run's folder, a checkpoint folder or the ``lit_model.pth`` in one.
        out_dir: Where the run writes.

    Raises:
        UserError: nothing to resume from, or out_dir belongs to another run.
    """
    try:
        os.listdir(out_dir)
    except FileNotFoundError:
        pass
    except OSError as error:
        what = "is a file" if os.path.isfile(out_dir) else error.strerror
        raise UserError(f"--out_dir {out_dir}: {what}; give a folder that can be read and written") from error
    known = {"false": False, "true": True, "auto": "auto"}
    resume = known.get(resume.lower(), resume) if isinstance(resume, str) else resume
    if resume is False:
        _require_unused(out_dir, "--resume auto goes on with it, another --out_dir starts afresh")
        return None
    if resume is True or resume == "auto":
        found = newest(out_dir)
        if found is None and resume is True:
            raise UserError(f"--resume true: no complete checkpoint in --out_dir {out_dir}; --resume auto starts one")
        if found is None and (existing := next(_model_folders(out_dir), None)):
            raise UserError(
                f"--out_dir {out_dir}: {existing.name} has no file {COMPLETE}, so it cannot be resumed and is not "
                "overwritten; give another --out_dir"
            )
        return found
    found = _named_checkpoint(Path(resume).expanduser())
    if out_dir.resolve() not in found.resolve().parents:
        _require_unused(out_dir, f"--resume {resume} is of another run; give another --out_dir")
    elif (last := newest(out_dir)) is not None and step_of(last) > step_of(found):
        # Killed before it has passed them, the run would go on from a newer checkpoint of its former life.
        raise UserError(f"--resume {resume}: {last} is newer; to go on from the older one, give another --out_dir")
    return found


def _named_checkpoint(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"--resume {path}: no such folder or file; --resume auto takes the newest of --out_dir")
    if path.is_file() and path.name != WEIGHTS:
        raise UserError(f"--resume {path}: not a checkpoint; give a checkpoint folder or the {WEIGHTS} in one")
    folder = path.parent if path.name == WEIGHTS else path  # a file, or a folder of shards
    if is_complete(folder):
        return folder
    if folder is path and (found := newest(folder)) is not None:
        return found
    what = f"has no file {COMPLETE}: not written to its end" if _holds_model(folder) else "holds no complete checkpoint"
    raise UserError(f"--resume {path}: {what}; give another, or start from its weights with --initial_checkpoint_dir")


def _require_unused(out_dir: Path, hint: str) -> None:
    metrics = out_dir / "logs" / "metrics.csv"
    used = next((path for _, path in _complete_folders(out_dir)), None) or next(_model_folders(out_dir), None)
    if used is None and metrics.exists():
        used = metrics
    if used is not None:
        raise UserError(f"--out_dir {out_dir}: already used ({used.relative_to(out_dir)} is there); {hint}")


def _holds_model(folder: Path) -> bool:
    return (folder / WEIGHTS).exists() or (folder / "model_config.yaml").exists()


def _model_folders(out_dir: Path) -> Iterator[Path]:
    """The folders that are named like checkpoints, complete or not."""
    if out_dir.is_dir():
        names = (FINAL, BEST)
        yield from sorted(p for p in out_dir.iterdir() if p.is_dir() and (_STEP.fullmatch(p.name) or p.name in names))


def _complete_folders(out_dir: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of the complete checkpoints; one that was being replaced stands in for itself under its old name."""
    for path in _model_folders(out_dir):
        if is_complete(path):
            yield path.name, path
    for path in out_dir.glob(f"{_OLD}*"):
        name = path.name.removeprefix(_OLD)
        if is_complete(path) and not (out_dir / name).exists():
            yield name, path


def _move_in(tmp: Path, folder: Path) -> None:
    """Rename ``tmp`` to ``folder``; what is there gives way only for the instant between two renames."""
    aside = folder.with_name(f"{_OLD}{folder.name}")
    if folder.exists():
        os.rename(folder, aside)
    try:
        os.rename(tmp, folder)
        _sync(folder.parent)
    finally:
        if aside.exists():
            _put_back_or_delete(aside)


def _put_back_or_delete(aside: Path) -> None:
    folder = aside.with_name(aside.name.removeprefix(_OLD))
    if not folder.exists():
        os.rename(aside, folder)
        return
    gone = temporary_path(aside)
    os.rename(aside, gone)
    remove([gone])


def _sync_tree(folder: Path) -> None:
    """Bring every file and folder to the disk, so that a power cut after the rename finds them."""
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _explain(error: BaseException, tmp: Path, folder: Path) -> str | None:
    """What went wrong and the mend, if ``error`` says that the disk is full or out of reach, else None."""
    reason = full_disk(error)
    if reason is not None:
        before = newest(folder.parent)
        return (
            f"{reason}: stopped after {_size(tmp):,} bytes of {folder.name} with {_free(folder.parent):,} bytes free"
            + (f"; {before.name} with its {_size(before):,} bytes is kept" if before else "")
            + "; free some space or choose another folder"
        )
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, OSError):  # of one rank's shards
        return f"{error}; let every rank write there, or choose another folder"
    if isinstance(error, OSError) and not os.path.exists(tmp) and (error.errno in _OUT_OF_REACH or _is_of(error, tmp)):
        return f"{error.strerror}; choose another folder"
    return None


def _is_of(error: OSError, tmp: Path) -> bool:
    """Whether it came of making ``tmp`` or a folder that it lies in: /proc says ENOENT, others what they like."""
    return error.filename is not None and Path(str(error.filename)) in (tmp, *tmp.parents)


def full_disk(error: BaseException | None) -> str | None:
    """The reason if a full disk, a quota or a limit on the size of files is behind the error, else None."""
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            return error.strerror
        # torch's zip writer, given a path, loses the errno: this is all it says when a write falls short.
        if isinstance(error, RuntimeError) and re.search(r"unexpected pos|PytorchStreamWriter", str(error)):
            reason = full_disk(error.__cause__ or error.__context__)
            return reason or os.strerror(errno.ENOSPC)
        error = error.__cause__ or error.__context__
    return None


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free if folder.exists() else 0


def _size(folder: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if folder.is_file():
        return folder.stat().st_size
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
