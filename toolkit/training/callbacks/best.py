"""Keep the checkpoint with the best validation in ``best/``, and stop early.

Checkpoints store the best value, so a resumed run behaves like an uninterrupted one.
"""

from typing import Any

from toolkit.checkpoints.store import BEST, complete_checkpoints
from toolkit.distributed import ranks
from toolkit.planning.best_metric import VAL_LOSS, BestMetric
from toolkit.training.run import Callback, Metrics, Run


class _TracksBest(Callback):
    """Tracks the best value of a metric of validations."""

    def __init__(self, metric: BestMetric = VAL_LOSS) -> None:
        self.metric = metric
        self.best: float | None = None
        self.restarts = False  # whether the checkpoint has another metric

    def on_train_start(self, trainer: Run) -> None:
        if self.restarts:
            trainer.display.message(
                f"callback {type(self).__name__}: the checkpoint has another metric or direction; it starts anew with "
                f"{self.metric}"
            )

    def is_new_best(self, metrics: Metrics) -> bool:
        """Whether the metric on rank 0 is a new best value, which is then kept. Collective."""
        value = metrics.get(self.metric.name)
        is_new = ranks.broadcast_from_rank0(self.metric.is_better(value, self.best))
        if is_new:
            self.best = value
        return is_new

    def state_dict(self) -> dict[str, Any]:
        return self.metric.to_state(self.best)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.metric.is_of(state):
            self.best = state[self.metric.name]
        else:
            self.restarts = True


class KeepBest(_TracksBest):
    """Saves ``best/`` after every validation with a new best value, for ``--train.keep_best``."""

    def on_train_start(self, trainer: Run) -> None:
        super().on_train_start(trainer)
        if not ranks.broadcast_from_rank0(BEST in dict(complete_checkpoints(trainer.out_dir))):
            self.best = None  # best/ was deleted or damaged, or is in another folder: save it after the next validation

    def on_validation_end(self, trainer: Run, metrics: Metrics) -> None:
        if self.is_new_best(metrics):
            trainer.save(BEST)


class EarlyStopping(_TracksBest):
    """Ends the run after ``patience`` validations without a new best value, for ``--train.patience``."""

    def __init__(self, patience: int, metric: BestMetric = VAL_LOSS) -> None:
        super().__init__(metric)
        self.patience = patience
        self.stale_validations = 0  # since the best value

    def on_train_start(self, trainer: Run) -> None:
        super().on_train_start(trainer)
        self._stop_if_due(trainer)

    def on_validation_end(self, trainer: Run, metrics: Metrics) -> None:
        self.stale_validations = 0 if self.is_new_best(metrics) else self.stale_validations + 1
        self._stop_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"stale_validations": self.stale_validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stale_validations = state["stale_validations"] if self.metric.is_of(state) else 0

    def _stop_if_due(self, trainer: Run) -> None:
        if self.stale_validations >= self.patience:
            trainer.request_stop(f"{self.metric} is {self.patience} validations old (--train.patience)")
