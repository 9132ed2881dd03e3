"""What validations decide: ``best/``, the checkpoint with the lowest loss so far, and whether to stop early.

``best/`` is a checkpoint like the others, replaced by the next better one. The losses to beat are part of every
checkpoint's progress, so that a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from toolkit.checkpoints.store import BEST, has_best
from toolkit.config import EvalArgs, TrainArgs
from toolkit.data.base import PreparedData
from toolkit.distributed import ranks
from toolkit.errors import UserError
from toolkit.planning.limits import Progress
from toolkit.training.callbacks.base import Callback, Trainer


class KeepBest(Callback):
    """Saves ``best/`` after every validation with a lower loss than all before, for ``--train.keep_best``."""

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if is_lower(metrics, trainer.progress.best_val_loss):
            trainer.progress.best_val_loss = metrics["val_loss"]
            trainer.save(BEST)


class EarlyStopping(Callback):
    """Ends the run after ``patience`` validations without a new lowest loss, for ``--train.patience``."""

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_train_start(self, trainer: Trainer) -> None:
        self._stop_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        progress = trainer.progress
        if is_lower(metrics, progress.lowest_val_loss):
            progress.lowest_val_loss, progress.stale_validations = metrics["val_loss"], 0
        else:
            progress.stale_validations += 1
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if trainer.progress.stale_validations >= self.patience:
            trainer.request_stop(f"no lower validation loss in {self.patience} validations (--train.patience)")


def is_lower(metrics: dict[str, float], before: float | None) -> bool:
    """Whether a validation's loss is lower than ``before``; the same on every rank, which all call this."""
    loss = metrics.get("val_loss")
    return ranks.broadcast_from_rank0(loss is not None and (before is None or loss < before))


def check_config(train: TrainArgs, evaluation: EvalArgs, data: PreparedData) -> None:
    """Check that there are validations, where ``--train.keep_best`` or ``--train.patience`` decides by them.

    Raises:
        UserError: nothing is held out, or the run never validates.
    """
    flags = {"keep_best true": train.keep_best, f"patience {train.patience}": train.patience is not None}
    for flag in (flag for flag, is_given in flags.items() if is_given):
        if data.val is None or not len(data.val):
            raise UserError(
                f"--train.{flag}: this data has no held-out part to validate on; give one "
                "(such as --data.val_split_fraction 0.05, for text --data.val_fraction), or leave it out"
            )
        if not (evaluation.interval or evaluation.final_validation or evaluation.initial_validation):
            raise UserError(f"--train.{flag}: the run never validates; set --eval.interval")
    if train.patience is not None and not evaluation.interval:
        raise UserError(f"--train.patience {train.patience}: would have no effect without --eval.interval")


def reset_if_missing(progress: Progress, out_dir: Path, damaged: Collection[Path] = ()) -> None:
    """Where ``best/`` was deleted, is among the ``damaged``, or belongs to another folder's run, the next validation is
    the best one again."""
    if not ranks.broadcast_from_rank0(has_best(out_dir) and out_dir / BEST not in damaged):
        progress.best_val_loss = None
