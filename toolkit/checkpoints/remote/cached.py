"""Cache remote checkpoints locally, for commands such as ``toolkit generate s3://bucket/run/final``."""

import sys
from functools import cache
from pathlib import Path

from toolkit.checkpoints.manifest import COMPLETE
from toolkit.checkpoints.remote import checkpoints
from toolkit.checkpoints.remote.download import download, has_same_manifest
from toolkit.checkpoints.remote.run import local_name
from toolkit.errors import UserError
from toolkit.io.locks import file_lock
from toolkit.io.storage import Storage


@cache  # once per process: a run asks for the folder of its base several times
def local_copy(url: str, flag: str, with_trainer: bool = False) -> Path:
    """Download a checkpoint, or a run's newest one, to the user's cache if needed. Return the local folder.

    Error messages name the option ``flag``. ``with_trainer`` also downloads the trainer state, which resuming needs.
    """
    storage = Storage(url, flag)
    target = local_name(url, "checkpoints" if with_trainer else "models")
    try:
        with storage.one_line_errors():
            folder = "" if storage.exists(COMPLETE) else find_folder(storage)
            target.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(target.with_name(f"{target.name}.lock")):  # one process of a node downloads, the others wait
                if not has_same_manifest(storage, folder, target):
                    download(storage, folder, target, lambda line: print(line, file=sys.stderr), not with_trainer)
            return target
    except OSError as error:
        raise UserError(f"{flag} {url}: cannot be copied to {target}: {error.strerror or error}") from error


def find_folder(storage: Storage) -> str:
    """Return the folder name of a run's newest checkpoint."""
    newest = next(checkpoints.newest_first(storage), None)
    if newest is not None:
        return newest.folder
    what = f"has no file {COMPLETE}, so it cannot be verified; copy it to a local folder and give that folder"
    raise storage.error(what if storage.entries() else "no such checkpoint or run; check the URL")
