"""`toolkit finetune_full`: finetune all weights of a checkpoint on instructions or text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config import AUTO, FINETUNE, Auto, EvalArgs, OptimizerArgs, Precision, RunOptions, TrainArgs
from toolkit.data import JSON, DataModule
from toolkit.extension import NO_GROUPS
from toolkit.objectives import NextToken, Objective


def setup(
    checkpoint_dir: str,
    data: DataModule = JSON(json_path=""),
    train: TrainArgs = TrainArgs(global_batch_size=FINETUNE.global_batch_size, learning_rate=2e-5, keep_last=2),
    eval: EvalArgs = EvalArgs(max_new_tokens=AUTO),
    optimizer: OptimizerArgs = OptimizerArgs(),
    objective: Objective = NextToken(),
    out_dir: str = "out/finetune/full",
    precision: Precision | Auto = AUTO,
    shared: RunOptions = RunOptions(),
    groups: Mapping[str, Any] = NO_GROUPS,
) -> None:
    """Finetune all weights of a checkpoint on instructions or text; 3 epochs by default.

    Args:
        checkpoint_dir: The initial model: a checkpoint folder, or a name below checkpoints/.
        data: Training data.
        train: Training options.
        eval: Validation options.
        optimizer: Optimizer options.
        objective: The training objective.
        out_dir: Folder for checkpoints and logs; also on remote storage, such as s3://bucket/run.
        precision: auto: 32-true on CPU, bf16-mixed on CUDA.
        shared: See :class:`toolkit.config.RunOptions`.
        groups: Options of extensions by group.
    """
    from toolkit.planning.options import check_start
    from toolkit.planning.run_args import run_args

    args = run_args(
        "finetune_full", shared, checkpoint_dir=checkpoint_dir,
        data=data, train=train, eval=eval, optimizer=optimizer, objective=objective, out_dir=out_dir,
        precision=precision, groups=groups,
    )  # fmt: skip
    check_start(args)
    from toolkit.training.trainer import run_training  # imports torch

    run_training(args)
