"""``best/``: the checkpoint with the lowest validation loss so far, for ``--train.keep_best``.

It is a checkpoint like the others, written whole at the step of that validation and replaced by the next better one.
The loss to beat is part of every checkpoint's progress: a resumed run, too, replaces it only by a better one.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from toolkit.args import EvalArgs, TrainArgs
from toolkit.checkpoints.store import BEST, has_best
from toolkit.data.base import PreparedData
from toolkit.distributed import ranks
from toolkit.errors import UserError
from toolkit.training.state import Progress


def check_config(train: TrainArgs, evaluation: EvalArgs, data: PreparedData) -> None:
    """Make sure that there are validations to choose by, where the best checkpoint is to be kept.

    Raises:
        UserError: nothing is held out, or the run never validates.
    """
    if not train.keep_best:
        return
    if data.val is None or not len(data.val):
        raise UserError(
            "--train.keep_best true: this data has no held-out part to choose by; give one "
            "(such as --data.val_split_fraction 0.05, for text --data.val_fraction), or leave it out"
        )
    if not (evaluation.interval or evaluation.final_validation or evaluation.initial_validation):
        raise UserError("--train.keep_best true: the run never validates; set --eval.interval")


def reset_if_missing(progress: Progress, out_dir: Path, damaged: Collection[Path] = ()) -> None:
    """Where ``best/`` was deleted, is among the ``damaged``, or belongs to another folder's run, the next validation is
    the best one again."""
    if not ranks.broadcast_from_rank0(has_best(out_dir) and out_dir / BEST not in damaged):
        progress.best_val_loss = None


def is_best(progress: Progress, metrics: dict[str, float]) -> bool:
    """Whether a validation has the lowest loss so far, which is noted; the same on every rank."""
    loss, before = metrics.get("val_loss"), progress.best_val_loss
    better = ranks.broadcast_from_rank0(loss is not None and (before is None or loss < before))
    if better:
        progress.best_val_loss = loss
    return better
