"""Keep the checkpoint with the lowest validation loss in ``best/``, and stop early.

Checkpoints store the lowest loss, so a resumed run behaves like an uninterrupted one.
"""

from typing import Any

from toolkit.checkpoints.store import BEST, has_best
from toolkit.distributed import ranks
from toolkit.training.run import Callback, Run


class KeepBest(Callback):
    """Saves ``best/`` after every validation with a new lowest loss, for ``--train.keep_best``."""

    def __init__(self) -> None:
        self.val_loss: float | None = None

    def on_train_start(self, trainer: Run) -> None:
        if not ranks.broadcast_from_rank0(has_best(trainer.out_dir)):
            self.val_loss = (
                None  # best/ was deleted or damaged, or is in another folder: save it after the next validation
            )

    def on_validation_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        if is_lower(metrics, self.val_loss):
            self.val_loss = metrics["val_loss"]
            trainer.save(BEST)

    def state_dict(self) -> dict[str, Any]:
        return {"val_loss": self.val_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.val_loss = state["val_loss"]


class EarlyStopping(Callback):
    """Ends the run after ``patience`` validations without a new lowest loss, for ``--train.patience``."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.val_loss: float | None = None
        self.stale_validations = 0  # since the lowest loss

    def on_train_start(self, trainer: Run) -> None:
        self._stop_if_due(trainer)

    def on_validation_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        if is_lower(metrics, self.val_loss):
            self.val_loss, self.stale_validations = metrics["val_loss"], 0
        else:
            self.stale_validations += 1
        self._stop_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"val_loss": self.val_loss, "stale_validations": self.stale_validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.val_loss, self.stale_validations = state["val_loss"], state["stale_validations"]

    def _stop_if_due(self, trainer: Run) -> None:
        if self.stale_validations >= self.patience:
            trainer.request_stop(f"no lower validation loss in {self.patience} validations (--train.patience)")


def is_lower(metrics: dict[str, float], before: float | None) -> bool:
    """Whether the validation loss on rank 0 is lower than ``before``. Collective."""
    loss = metrics.get("val_loss")
    return ranks.broadcast_from_rank0(loss is not None and (before is None or loss < before))
