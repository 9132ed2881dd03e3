"""Upload a run to remote storage: rank 0 and the first rank of each other disk upload, all ranks wait."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.store import BEST, FINAL, PARTS, prune
from toolkit.distributed import ranks
from toolkit.errors import GuardError
from toolkit.io.atomic import file_error
from toolkit.planning.run_args import RunArgs
from toolkit.training.run import Callback, Metrics, Run, late

if TYPE_CHECKING:
    from toolkit.checkpoints.remote.uploader import Uploader

MAX_PENDING_UPLOADS = 2  # checkpoints waiting for upload
SECONDS_AFTER_FAILURE = 20.0  # less than the timeout of the other ranks


class Upload(Callback):
    """Uploads every checkpoint, and the run's other files at its end.

    The staging folder keeps the newest step checkpoint, ``best``, ``final`` and at most :data:`MAX_PENDING_UPLOADS`
    checkpoints that are not uploaded yet; if the machines do not share it, only parts of the latter. ``uploader`` is
    None except on rank 0 and, in this case, the first rank of each other machine.
    """

    def __init__(self, uploader: "Uploader | None", args: RunArgs, display: Any) -> None:
        self.uploader, self.args, self.display = uploader, args, display
        self._lease = None if uploader is None else uploader.lease  # on rank 0
        self._has_parts = False

    @late
    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        self._report()

    def on_checkpoint_saved(self, trainer: Run, folder: Path) -> None:
        self._has_parts = folder.parent.name == PARTS
        if self.uploader is not None:
            try:
                self.uploader.submit(folder)
            except OSError as error:
                raise file_error(self.args.run_dir, error) from error
            prune(self.args.run_dir, keep_last=1)
        self.wait(MAX_PENDING_UPLOADS)
        taken_by = ranks.broadcast_from_rank0(None if self._lease is None else self._lease.taken_by)
        if taken_by is not None:
            raise GuardError(
                f"--out_dir {self.args.out_dir}: another run has started in it ({taken_by}); stopped after step "
                f"{trainer.progress.step}{'' if self._has_parts else f'; {folder} is saved'}. Use one --out_dir per run"
            )

    def on_train_end(self, trainer: Run) -> None:
        self.finish()

    def finish(self) -> None:
        """Upload the remaining files. Collective."""
        self.wait()
        if self.uploader is None or self._lease is None:
            return
        self._finish()
        for name in (FINAL, BEST):
            if name in self.uploader.failed:
                where, effect = f"it is complete in {self.args.run_dir / name}", "uploads it"
                if self._has_parts:
                    where, effect = "no machine has all of it", "continues from the newest checkpoint there"
                raise GuardError(
                    f"--out_dir {self.args.out_dir}: {name} could not be uploaded: {self.uploader.failed[name]}; "
                    f"{where}, and the same command with --resume auto {effect} (see remote_storage: failed uploads)"
                )

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        if self.uploader is not None:
            self.uploader.wait(None if ranks.world_size() == 1 else SECONDS_AFTER_FAILURE)
            self._finish()

    def wait(self, at_most: int = 0) -> None:
        """Wait until at most ``at_most`` checkpoints are not uploaded. Collective."""

        def on_heartbeat(_: list[int]) -> None:
            self.display.phase("uploading")
            self._share_ended_parts()

        self._share_ended_parts()
        ranks.wait_for_all(lambda seconds: self.uploader is None or self.uploader.wait(seconds, at_most), on_heartbeat)
        self._report()

    def _share_ended_parts(self) -> None:
        """Cancel the parts of checkpoints that have failed on another machine. Collective."""
        if self._has_parts:
            ended = ranks.all_gather_object(set() if self.uploader is None else self.uploader.take_ended_parts())
            if self.uploader is not None:
                self.uploader.cancel_parts(set().union(*ended))

    def _finish(self) -> None:
        assert self.uploader is not None
        if self._lease is not None and (reason := self.uploader.upload_outputs()) is not None:
            self.display.message(f"warning: logs could not be uploaded to {self.args.out_dir}: {reason}")
        self._report()

    def _report(self) -> None:
        for line in [] if self.uploader is None else self.uploader.take_messages():
            (ranks.rank_print if self._lease is None else self.display.message)(line)


def uploads(callbacks: Iterable[Callback]) -> list[Upload]:
    """Return the callbacks that upload the run: none or one."""
    return [callback for callback in callbacks if isinstance(callback, Upload)]
