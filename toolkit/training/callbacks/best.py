"""What validations decide: ``best/``, the checkpoint with the lowest loss so far, and whether to stop early.

``best/`` is a checkpoint like the others, replaced by the next better one. The losses to beat are part of every
checkpoint's progress, so that a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.checkpoints.store import BEST
from toolkit.distributed import ranks
from toolkit.training.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer


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
