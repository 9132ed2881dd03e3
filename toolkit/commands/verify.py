"""`toolkit verify`: verify the checksums of checkpoints."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.checkpoints.manifest import COMPLETE, read_manifest
from toolkit.checkpoints.remote.download import fetch_files, remote_manifest
from toolkit.errors import UserError
from toolkit.io.checksums import find_damage
from toolkit.io.paths import is_url
from toolkit.io.storage import Storage, StorageError


def setup(checkpoint_dir: str) -> None:
    """Verify all files of a checkpoint, or of all checkpoints of a run, and list the damaged ones.

    The exit code is 0 if all are intact, and 2 otherwise.

    Args:
        checkpoint_dir: A checkpoint folder, a name below checkpoints/, or the out_dir of a run; also on remote storage.
    """
    checkpoints = find_remote(checkpoint_dir) if is_url(checkpoint_dir) else find_local(checkpoint_dir)
    failed = []
    for name, (read, compare) in checkpoints.items():
        try:
            files = read()
            if files is None:
                raise UserError(f"{name}: has no checksums (empty COMPLETE of an older version)")
            if damage := compare(files):
                raise UserError("\n".join(f"{name}/{file}: {why}" for file, why in damage.items()))
            print(f"{name}: intact, {len(files)} files, {sum(f['size'] for f in files.values()):,} bytes")
        except (UserError, StorageError) as error:
            print(error if isinstance(error, UserError) else f"{name}: {error}")
            failed.append(name)
    if failed:
        names = ", ".join(name.rpartition("/")[2] for name in failed)
        raise UserError(f"checkpoint_dir {checkpoint_dir}: {len(failed)} of {len(checkpoints)} not verified: {names}")


Checkpoint = tuple[Callable[[], Any], Callable[[Any], dict[str, str]]]
"""Two functions: read a checkpoint's manifest, and return the damaged files with reasons, given the manifest."""


def find_local(checkpoint_dir: str) -> dict[str, Checkpoint]:
    """Return the checkpoints in a folder, by path."""
    from toolkit.checkpoints.store import WEIGHTS, is_complete, newest_first

    path = Path(checkpoint_dir)
    path = path if path.is_dir() else Path("checkpoints") / path
    folders = [path] if is_complete(path) else sorted(newest_first(path))
    if not folders:
        is_model = (path / WEIGHTS).exists()
        why = f"has no checksums (no file {COMPLETE})" if is_model else "contains no complete checkpoint"
        raise UserError(f"checkpoint_dir {checkpoint_dir}: {why}; give the folder of a checkpoint or of a run")
    return {str(folder): (partial(read_manifest, folder), partial(find_damage, folder)) for folder in folders}


def find_remote(url: str) -> dict[str, Checkpoint]:
    """Return the checkpoints at the URL of a run or a checkpoint, by URL. Their files are not stored locally."""
    from toolkit.checkpoints.remote.checkpoints import newest_first

    storage = Storage(url, "checkpoint_dir")
    with storage.one_line_errors():
        is_checkpoint = storage.exists(COMPLETE)
        folders = [""] if is_checkpoint else sorted(checkpoint.folder for checkpoint in newest_first(storage))
    if not folders:
        raise storage.error("contains no complete checkpoint; give the URL of a checkpoint or of a run")
    return {
        f"{storage.url}/{folder}".rstrip("/"): (
            partial(remote_manifest, storage, folder),
            partial(fetch_files, storage, folder, target=None),
        )
        for folder in folders
    }
