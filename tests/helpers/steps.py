"""One optimizer step, as a run does it."""

from typing import Any

from lightning.fabric import Fabric

from toolkit.data.batch import Batch
from toolkit.objectives import NextToken, Objective
from toolkit.objectives.base import total_counts
from toolkit.optim.update import Update, choose_update, set_learning_rate
from toolkit.training.step import StepResult, train_step

NEXT_TOKEN = NextToken()


def run_step(update: Update, batches: list[Batch], objective: Objective = NEXT_TOKEN, **options: Any) -> StepResult:
    """Count what the objective divides by, in this process, and call ``train_step``."""
    return train_step(objective, update, batches, total_counts(objective, batches), **options)


def one_step(
    fabric: Fabric, model: Any, optimizer: Any, batches: list[Batch], learning_rate: float, **options: Any
) -> StepResult:
    """Choose the update anew, for a model and an optimizer as Fabric has wrapped them."""
    overlap = options.pop("overlap", lambda: None)
    set_learning_rate(optimizer, learning_rate)
    update = choose_update(fabric, model, optimizer, options.pop("max_norm", None), **options)
    return run_step(update, batches, overlap=overlap)
