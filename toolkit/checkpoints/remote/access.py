"""Options that may be on remote storage. Imports the rest of this package only for a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import UserError
from toolkit.io.paths import cache_folder, is_url

if TYPE_CHECKING:
    from toolkit.checkpoints.remote.remote_run import RemoteRun


def local_folder(value: str | Path, flag: str, with_trainer: bool = False) -> Path:
    """Return the path of an option; a URL is downloaded, see :func:`toolkit.checkpoints.remote.download.local_copy`."""
    if not is_url(value):
        return Path(value)
    from toolkit.checkpoints.remote.download import local_copy

    return local_copy(str(value), flag, with_trainer)


def require_storage(value: str, flag: str) -> None:
    """Raise UserError if the option is a URL whose file system's package is not installed."""
    if is_url(value):
        from toolkit.io.storage import Storage

        Storage(value, flag)


def check_out_dir(out_dir: str, staging_dir: str | None) -> None:
    """Raise UserError if the storage's package is not installed or --staging_dir has no effect."""
    require_storage(out_dir, "--out_dir")
    if staging_dir is not None and not is_url(out_dir):
        raise UserError(f"--staging_dir {staging_dir}: has no effect with the local --out_dir {out_dir}; remove it")


def run_folder(out_dir: str, staging_dir: str | None) -> Path:
    """Return the local folder of a run: ``out_dir``, or its staging folder if ``out_dir`` is on remote storage."""
    if not is_url(out_dir):
        return Path(out_dir)
    return Path(staging_dir) if staging_dir else cache_folder(out_dir, "runs")


def open_remote_run(out_dir: str, folder: Path) -> RemoteRun | None:
    """Return the remote storage of a run that works in ``folder``; None without remote storage."""
    if not is_url(out_dir):
        return None
    from toolkit.checkpoints.remote.remote_run import RemoteRun

    return RemoteRun(out_dir, folder)
