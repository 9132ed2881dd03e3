"""Upload a run's staging folder to remote storage in the background.

Checkpoints are uploaded from hard links, because the run may delete or replace a checkpoint during the upload. Machines
without a shared staging folder each save and upload their part of a sharded checkpoint, and keep no complete one.
"""

import os
import shutil
import threading
from collections import deque
from pathlib import Path

from toolkit.checkpoints.manifest import manifest_bytes
from toolkit.checkpoints.remote import checkpoints
from toolkit.checkpoints.remote.checkpoints import METRICS
from toolkit.checkpoints.remote.lease import Lease
from toolkit.checkpoints.store import FINAL, PARTS, ROLLOUTS, SAVE_NOW, STOP, checkpoint_folders, file_names
from toolkit.errors import one_line
from toolkit.io.atomic import link_or_copy
from toolkit.io.storage import Storage, StorageError

LINKS = ".uploads"
_POLL_S = 1.0  # seconds between looks for what other machines have uploaded
_MAX_LIVE_LOG_BYTES = 64 * 1024 * 1024  # bytes; larger log files (except metrics.csv) are uploaded only at the end


class Uploader:
    """Uploads checkpoints sequentially in a background thread.

    Args:
        storage: The run's folder on remote storage.
        lease: The acquired lease on that folder; None where another machine than rank 0's uploads its parts.
        out_dir: The staging folder, locked by this process.
        keep_last: Number of step checkpoints to keep on the storage; 0 keeps all.
    """

    def __init__(self, storage: Storage, lease: Lease | None, out_dir: Path, keep_last: int) -> None:
        self.storage, self.lease, self.out_dir, self.keep_last = storage, lease, out_dir, keep_last
        self.failed: dict[str, str] = {}
        """{checkpoint: reason} of uploads that failed."""
        self._messages: deque[str] = deque()
        self._tasks: deque[Path] = deque()
        self._parts: dict[Path, str] = {}  # {task: digest of the manifest} for parts of checkpoints
        self._ended_parts: set[str] = set()
        self._canceled_parts: set[str] = set()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._n_links = 0
        self._versions: dict[str, tuple[int, int]] = {}  # size and mtime of each log file when it was uploaded
        for name in (LINKS, PARTS):
            shutil.rmtree(out_dir / name, ignore_errors=True)  # left by an earlier process
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)
        self._thread.start()

    def submit(self, folder: Path) -> None:
        """Queue a checkpoint in ``out_dir`` for upload. Raises OSError if the disk is full.

        A part of a checkpoint (in :data:`PARTS`) is moved.
        """
        self._n_links += 1
        links = self.out_dir / LINKS / str(self._n_links) / folder.name
        if folder.parent.name == PARTS:
            links.parent.mkdir(parents=True)
            folder.rename(links)
            self._parts[links] = checkpoints.digest(manifest_bytes(links))
        else:
            for name in file_names(folder):
                target = links / name
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(folder / name, target)
        with self._changed:
            self._tasks.append(links)
            self._changed.notify_all()

    def wait(self, seconds: float | None, at_most: int = 0) -> bool:
        """Wait until at most ``at_most`` uploads are pending. Return False after a timeout of ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._tasks) <= at_most, seconds)

    def take_ended_parts(self) -> set[str]:
        """Return and clear what has ended here, so that no other machine needs to upload or wait for its parts."""
        with self._changed:
            ended, self._ended_parts = self._ended_parts, set()
            return ended

    def cancel_parts(self, ended: set[str]) -> None:
        """Do not wait any longer for parts that have ended on another machine."""
        with self._changed:
            self._canceled_parts |= ended
            self._changed.notify_all()

    def take_messages(self) -> list[str]:
        """Return and clear new log messages, one per failed upload."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def upload_outputs(self) -> str | None:
        """Upload all files outside checkpoints, such as logs and profiles. Return the error message, if any."""
        try:
            for path in self._outputs(self.out_dir):
                self._upload_log(path)
        except (StorageError, OSError) as error:
            return one_line(error)
        return None

    def close(self) -> None:
        """Discard queued uploads and release the lease."""
        with self._changed:
            self._tasks.clear()
            self._closed.set()
            self._changed.notify_all()
        if self.lease is not None:
            self.lease.release()

    # ---- the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed.is_set())
                if not self._tasks:
                    return
                links = self._tasks[0]
            self._upload(links)
            shutil.rmtree(links.parent, ignore_errors=True)
            with self._changed:
                if self._tasks and self._tasks[0] is links:
                    self._tasks.popleft()
                self._changed.notify_all()

    def _upload(self, links: Path) -> None:
        name, is_part = links.name, links in self._parts
        self.failed.pop(name, None)
        try:
            if self.lease is None:
                checkpoints.upload_part(self.storage, links, name, lambda: self._is_canceled(links))
            else:
                self.lease.require_held()
                is_canceled = (lambda: self._is_canceled(links)) if is_part else None
                checkpoints.upload(self.storage, links, name, self._before_complete, is_canceled)
                checkpoints.prune(self.storage, self.keep_last, is_over=name == FINAL)
        except Exception as error:  # no failed upload may stop training
            reason = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {one_line(error)}"
            self.failed[name] = reason
            where = "" if is_part else f"; it is in {self.out_dir}"
            self._messages.append(f"warning: {name} could not be uploaded to {self.storage.url}: {reason}{where}")

        if is_part:
            with self._changed:
                part = self._parts.pop(links)
                if self.lease is not None or name in self.failed:
                    self._ended_parts.add(part)

    def _is_canceled(self, links: Path) -> bool:
        """Wait a moment, and return whether to give up a part."""
        with self._changed:
            return self._changed.wait_for(
                lambda: links not in self._tasks or self._parts[links] in self._canceled_parts, _POLL_S
            )

    def _before_complete(self) -> None:
        """Upload changed files, so that metrics.csv has all rows up to the checkpoint being uploaded.

        Of :data:`ROLLOUTS`, delete what the run has deleted.
        """
        rollouts = self.out_dir / ROLLOUTS
        for name in self.storage.files(ROLLOUTS) if rollouts.is_dir() else ():
            if not (rollouts / name).exists():
                self.storage.delete(f"{ROLLOUTS}/{name}")
        for path in self._outputs(self.out_dir):
            try:
                if path.stat().st_size <= _MAX_LIVE_LOG_BYTES or path == self.out_dir / METRICS:
                    self._upload_log(path)
            except OSError:  # a logger may have deleted it
                continue
        assert self.lease is not None
        self.lease.require_held()  # the upload may have taken long

    def _upload_log(self, path: Path) -> None:
        name = path.relative_to(self.out_dir).as_posix()
        stat = path.stat()
        version = (stat.st_size, stat.st_mtime_ns)
        if self._versions.get(name) == version:
            return
        if stat.st_size <= _MAX_LIVE_LOG_BYTES or name == METRICS:
            self.storage.write(name, path.read_bytes())  # not upload: the file may grow meanwhile
        else:
            self.storage.upload(path, name)
        self._versions[name] = version

    def _outputs(self, folder: Path) -> list[Path]:
        """Return files below a folder outside checkpoints, without hidden files, symbolic links, STOP and SAVE_NOW."""
        skipped = {path.name for path in checkpoint_folders(self.out_dir)}
        paths = []
        for root, folders, names in os.walk(folder):
            is_top = Path(root) == self.out_dir
            hidden = [n for n in folders if n.startswith((".", "damaged-")) or (is_top and n in skipped)]
            folders[:] = sorted(set(folders) - set(hidden))
            requests = {STOP, SAVE_NOW} if is_top else set()  # another machine would carry them out again
            paths += [Path(root) / name for name in sorted({*names} - requests) if not name.startswith(".")]
        return [path for path in paths if path.is_file() and not path.is_symlink()]
