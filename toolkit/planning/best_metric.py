"""The metric of a validation that decides which checkpoint is the best one, and when to stop early."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config import AUTO, EvalArgs
from toolkit.errors import UserError, did_you_mean
from toolkit.extension import is_built_in, registered
from toolkit.objectives.base import Objective

VAL = "val_"
"""Start of the name of every metric of a validation."""


def direction_of(higher_is_better: bool | dict[str, bool | None] | None, name: str) -> bool | None:
    """Return whether the highest value of a metric is the best one; None if unknown."""
    return higher_is_better.get(name) if isinstance(higher_is_better, dict) else higher_is_better


@dataclass(frozen=True)
class BestMetric:
    """A column of metrics.csv, and its direction: None if unknown.

    Its state in a checkpoint is ``{name: best value}``, with ``is_higher_better`` if it is.
    """

    name: str = "val_loss"
    is_higher_better: bool | None = False

    @classmethod
    def from_options(cls, evaluation: EvalArgs, objective: Objective) -> "BestMetric":
        """Return the metric of ``--eval.best_by`` and ``--eval.best_mode``."""
        if evaluation.best_by == AUTO:
            mode, part = evaluation.best_mode, objective.best_by
            return cls(VAL + part, objective.higher_is_better.get(part, False) if mode == AUTO else mode == "max")
        name = VAL + evaluation.best_by.removeprefix(VAL)
        return cls(name, None if evaluation.best_mode == AUTO else evaluation.best_mode == "max")

    def among(self, directions: Mapping[str, bool | None]) -> "BestMetric":
        """Return the metric with its direction.

        Args:
            directions: Whether the highest value is the best, of each metric of the run; None if unknown.

        Raises:
            UserError: There is no such metric, or its direction is unknown.
        """
        self.require_one_of(directions)
        is_higher = directions[self.name] if self.is_higher_better is None else self.is_higher_better
        if is_higher is None and not ("loss" in self.name or "error" in self.name):
            raise UserError(
                f"--eval.best_by {self.name}: does not say whether the highest or the lowest value is the best; add "
                "--eval.best_mode max or min, or set higher_is_better of its function or callback"
            )
        return replace(self, is_higher_better=bool(is_higher))

    def require_one_of(self, names: Collection[str]) -> None:
        """Raise UserError if the run has no such metric."""
        if self.name in names:
            return
        hint = did_you_mean(self.name, names) or f"; use {', '.join(names) or 'a run with validations'}"
        if (metric := self.name.removeprefix(VAL)) in registered("metrics"):
            hint = f"; add --eval.metric {metric}"
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
        """Whether a state is of this metric and, if it is known, this direction."""
        is_higher = bool(state.get("is_higher_better"))
        return self.name in state and self.is_higher_better in (None, is_higher)


VAL_LOSS = BestMetric()


def check_best_by(
    evaluation: EvalArgs, objective: Objective, has_callbacks: bool, metric_names: Iterable[str] = ()
) -> None:
    """Raise UserError if the options already show that no metric has the name of ``--eval.best_by``.

    ``metric_names`` are the names of ``--eval.metric``. The names of callbacks, tasks and objectives of a user, and of
    parts of a loss are not known yet.
    """
    best = BestMetric.from_options(evaluation, objective)
    has_unknown = has_callbacks or evaluation.tasks is not None or not is_built_in(type(objective))
    if has_unknown or "loss" in best.name:
        return
    names = [VAL_LOSS.name, *["val_ppl", "val_bpb"] * objective.is_likelihood]
    best.require_one_of([*names, *(f"{VAL}{name}" for name in (*objective.higher_is_better, *metric_names))])
