"""Uploads of a run whose ``--out_dir`` is on remote storage: started on rank 0, waited for on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoints.remote.uploader import Uploader
from toolkit.checkpoints.store import BEST, FINAL, prune
from toolkit.distributed import ranks
from toolkit.errors import GuardError
from toolkit.training.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer

MAX_WAITING = 2  # checkpoints that training may be ahead of the uploads
SECONDS_AFTER_FAILURE = 20.0  # less than other ranks have patience for


class Upload(Callback):
    """Uploads every checkpoint, and all other files of the run at its end.

    Only the newest step checkpoint stays in the staging folder, beside ``best``, ``final`` and the files that are still
    to be uploaded, which are at most those of :data:`MAX_WAITING` checkpoints.

    Args:
        uploader: On rank 0; None on the others.
    """

    def __init__(self, uploader: Uploader | None) -> None:
        self.uploader = uploader

    def on_step_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._report(trainer)

    def on_checkpoint_saved(self, trainer: Trainer, folder: Path) -> None:
        """
        Raises:
            GuardError: another run has taken over the folder on the storage; on every rank.
        """
        if self.uploader is not None:
            self.uploader.submit(folder)
            prune(trainer.out_dir, keep_last=1)
        self.wait(trainer, MAX_WAITING)
        taken_by = ranks.broadcast_from_rank0(None if self.uploader is None else self.uploader.lease.taken_by)
        if taken_by is not None:
            raise GuardError(
                f"--out_dir {trainer.args.out_dir}: another run has taken it over ({taken_by}); stopped after step "
                f"{trainer.progress.step}, {folder} is saved. Run only one of them"
            )

    def on_train_end(self, trainer: Trainer) -> None:
        """
        Raises:
            GuardError: the last checkpoint could not be uploaded.
        """
        self.wait(trainer)
        if self.uploader is None:
            return
        self._finish(trainer)
        for name in (FINAL, BEST):
            if name in self.uploader.failed:
                raise GuardError(
                    f"--out_dir {trainer.args.out_dir}: {name} could not be uploaded: {self.uploader.failed[name]}; "
                    f"it is complete in {trainer.out_dir / name}, and the same command with --resume auto uploads it"
                )

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        if self.uploader is not None:
            self.uploader.wait(None if ranks.world_size() == 1 else SECONDS_AFTER_FAILURE)
            self._finish(trainer)

    def wait(self, trainer: Trainer, at_most: int = 0) -> None:
        """Wait until at most so many checkpoints are left to upload; every rank calls this."""
        ranks.wait_for_all(
            lambda seconds: self.uploader is None or self.uploader.wait(seconds, at_most),
            lambda _: trainer.display.phase("uploading"),
        )
        self._report(trainer)

    def _finish(self, trainer: Trainer) -> None:
        assert self.uploader is not None
        if (reason := self.uploader.upload_outputs()) is not None:
            trainer.display.message(f"warning: logs could not be uploaded to {trainer.args.out_dir}: {reason}")
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        for line in [] if self.uploader is None else self.uploader.take_messages():
            trainer.display.message(line)


def submit_upload(callbacks: Iterable[Callback], folder: Path) -> None:
    """Upload a checkpoint that rank 0 has completed alone, where a run has uploads; not collective."""
    for callback in callbacks:
        if isinstance(callback, Upload) and callback.uploader is not None:
            callback.uploader.submit(folder)


def finish_uploads(callbacks: Iterable[Callback], trainer: Trainer) -> None:
    """Wait for all uploads, where a run has any; every rank calls this."""
    for callback in callbacks:
        if isinstance(callback, Upload):
            callback.wait(trainer)
