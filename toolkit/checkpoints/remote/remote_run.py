"""Runs with ``--out_dir`` on remote storage, which work in a local staging folder.

Before training, the checkpoint to resume from is downloaded. During training, checkpoints and metrics are uploaded.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

from toolkit.checkpoints.manifest import COMPLETE, DamagedCheckpointError, manifest_bytes, read_manifest
from toolkit.checkpoints.remote import checkpoints
from toolkit.checkpoints.remote.checkpoints import METRICS, RemoteCheckpoint
from toolkit.checkpoints.remote.download import download, has_same_manifest
from toolkit.checkpoints.remote.lease import Lease
from toolkit.checkpoints.remote.uploader import Uploader
from toolkit.checkpoints.store import BEST, FINAL, checkpoint_folders, newest_first, step_of
from toolkit.data.base import Report
from toolkit.errors import UserError
from toolkit.io.atomic import write_atomic
from toolkit.io.checksums import find_damage
from toolkit.io.storage import Storage


class RemoteRun:
    """A run on remote storage (``url``) with a local staging folder (``out_dir``)."""

    def __init__(self, url: str, out_dir: Path) -> None:
        self.url, self.out_dir = url.rstrip("/"), out_dir
        self.damaged: list[RemoteCheckpoint] = []
        """Checkpoints skipped because they do not match their manifest."""

    @cached_property
    def storage(self) -> Storage:
        return Storage(self.url, "--out_dir")

    @cached_property
    def lease(self) -> Lease:
        return Lease(self.storage)

    def prepare(self, resume: bool | str, report: Report, *, keep_best: bool = False, verify: bool = True) -> None:
        """Download the checkpoint to resume from to the staging folder. Called on rank 0 before the run starts.

        ``keep_best`` also downloads ``best/``. ``verify`` verifies checkpoints that are already in the staging folder.
        Raises DamagedCheckpointError if all checkpoints are damaged, or if the newest is and ``resume`` is true.
        """
        self.storage.probe()
        with self._one_line_errors():
            self.lease.require_free(report)
            if resume is True or resume == "auto":
                self._fetch_newest(resume == "auto", verify, report)
                best, local = checkpoints.find(self.storage, BEST) if keep_best else None, self.out_dir / BEST
                if best is not None and (not is_intact(local) or step_of(local) < best.step):
                    self._download(best, report)
            else:
                self._require_unused(resume)

    def fetch(self, name: str, manifest: bytes, report: Report) -> None:
        """Download a checkpoint on nodes without rank 0, unless the staging folder (on a shared disk) has it.

        A download deletes all other checkpoints in the staging folder. ``manifest`` is the content of ``COMPLETE`` on
        rank 0, because the storage may have an older checkpoint of this name.
        """
        target = self.out_dir / name
        with self._one_line_errors():
            if manifest_bytes(target) == manifest:
                return
            remote = checkpoints.find(self.storage, name)
            if remote is None or self.storage.read(f"{remote.folder}/{COMPLETE}") != manifest:
                raise UserError(
                    f"--out_dir {self.url}: {name} was not uploaded and is only in the staging folder of the first "
                    "node; start the command on that node alone once, or give --staging_dir on a shared disk"
                )
            download(self.storage, remote.folder, target, report)
            for folder in checkpoint_folders(self.out_dir):
                if folder != target:
                    shutil.rmtree(folder, ignore_errors=True)

    def start_uploads(self, keep_last: int, report: Report) -> Uploader:
        """Start the uploader. Queue the newest local checkpoint and ``best``, if the storage lacks them."""
        with self._one_line_errors(), ExitStack() as after_failure:
            after_failure.callback(self.lease.release)
            self.lease.acquire(report)
            for damaged in self.damaged:
                checkpoints.mark_damaged(self.storage, damaged.folder)
            checkpoints.finish_replacements(self.storage)
            uploader = Uploader(self.storage, self.lease, self.out_dir, keep_last)
            after_failure.callback(uploader.close)
            for folder in self._not_uploaded():
                uploader.submit(folder)
            after_failure.pop_all()
        return uploader

    def start_part_uploads(self) -> Uploader:
        """Start the uploader of a machine that does not share the staging folder of rank 0."""
        self.storage.probe()
        return Uploader(self.storage, None, self.out_dir, keep_last=0)

    # ---- parts

    def _not_uploaded(self) -> list[Path]:
        """Return the newest local checkpoint and ``best``, except those that the storage has (or newer ones)."""
        local = newest_first(self.out_dir)
        missing = []
        for folder in [*local[:1], *(path for path in local[1:] if path.name == BEST)]:
            remote = checkpoints.find(self.storage, folder.name)
            if remote is None or not (
                remote.step > step_of(folder) or has_same_manifest(self.storage, remote.folder, folder)
            ):
                missing.append(folder)
        return missing

    def _require_unused(self, resume: str | bool) -> None:
        what = "continues it" if resume is False else f"continues it, and --resume {resume} belongs to another run"
        if (used := checkpoints.find_existing_output(self.storage)) is not None:
            raise self.storage.error(
                f"already used ({used} exists); --resume auto {what}; another --out_dir starts a new run"
            )
        if (local := next(checkpoint_folders(self.out_dir), None)) is not None:
            raise self.storage.error(
                f"{local} was not uploaded; --resume auto {what}; delete that folder to start a new run"
            )

    def _fetch_newest(self, is_auto: bool, verify: bool, report: Report) -> None:
        local = next((path for path in newest_first(self.out_dir) if not verify or is_intact(path)), None)
        local_key = (-1, False) if local is None else (step_of(local), local.name == FINAL)
        error: DamagedCheckpointError | None = None
        for checkpoint in checkpoints.newest_first(self.storage):
            if local is not None and local_key >= (checkpoint.step, checkpoint.is_final):
                break
            try:
                self._download(checkpoint, report)
                break
            except DamagedCheckpointError as caught:
                error = caught
                if not is_auto:
                    raise
                report(f"warning: {error}; using the next older checkpoint")
                self.damaged.append(checkpoint)
        else:
            if local is None and error is not None:
                raise error
        if not (self.out_dir / METRICS).exists():
            self._download_metrics()

    def _download(self, checkpoint: RemoteCheckpoint, report: Report) -> None:
        self.out_dir.mkdir(parents=True, exist_ok=True)
        download(self.storage, checkpoint.folder, self.out_dir / checkpoint.name, report)
        if checkpoint.name != BEST:
            self._download_metrics()

    def _download_metrics(self) -> None:
        """Replace the local metrics.csv, which may lack rows from other launches."""
        if (content := self.storage.read(METRICS)) is not None:
            write_atomic(self.out_dir / METRICS, content)

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        try:
            with self.storage.one_line_errors():
                yield
        except OSError as error:
            hint = "give a writable folder with enough space"
            raise UserError(f"--staging_dir {self.out_dir}: {error.strerror or error}; {hint}") from error


def is_intact(folder: Path) -> bool:
    """Whether a local checkpoint exists and its files match its manifest."""
    try:
        files = read_manifest(folder)
    except UserError:
        return False
    return files is not None and not find_damage(folder, files)
