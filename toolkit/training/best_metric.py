"""The metric of a validation that decides which checkpoint is the best one, and when to stop early."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.config import AUTO, EvalArgs
from toolkit.errors import UserError, did_you_mean

VAL = "val_"
"""Start of the name of every metric of a validation."""


@dataclass(frozen=True)
class BestMetric:
    """A column of metrics.csv, and its direction.

    Its state in a checkpoint is ``{name: best value}``, with ``is_higher_better`` if it is.
    """

    name: str = "val_loss"
    is_higher_better: bool = False

    @classmethod
    def from_options(cls, evaluation: EvalArgs) -> "BestMetric":
        """Return the metric of ``--eval.best_by`` and ``--eval.best_mode``."""
        if evaluation.best_by == AUTO:
            return cls(is_higher_better=evaluation.best_mode == "max")
        name = VAL + evaluation.best_by.removeprefix(VAL)
        is_loss = name in ("val_ppl", "val_bpb") or "loss" in name or "error" in name
        return cls(name, evaluation.best_mode == "max" if evaluation.best_mode != AUTO else not is_loss)

    def require_one_of(self, names: Collection[str]) -> None:
        """Raise UserError if the run has no such metric."""
        if self.name not in names:
            hint = did_you_mean(self.name, names) or f"; use {', '.join(names) or 'a run with validations'}"
            raise UserError(f"--eval.best_by {self.name}: no metric of this run's validations has this name{hint}")

    def is_better(self, value: float | None, best: float | None) -> bool:
        """Whether a value is a new best one. NaN and infinity never are."""
        if value is None or not math.isfinite(value):
            return False
        return best is None or (value > best if self.is_higher_better else value < best)

    def __str__(self) -> str:
        return f"the {'highest' if self.is_higher_better else 'lowest'} {self.name}"

    def to_state(self, best: float | None) -> dict[str, Any]:
        return {self.name: best} | ({"is_higher_better": True} if self.is_higher_better else {})

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of this metric and direction."""
        return self.name in state and bool(state.get("is_higher_better")) == self.is_higher_better


VAL_LOSS = BestMetric()
