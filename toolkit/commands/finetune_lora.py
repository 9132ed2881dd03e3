"""`toolkit finetune_lora`: train low-rank adapters on the frozen weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config import AUTO, FINETUNE, Auto, EvalArgs, OptimizerArgs, Precision, RunOptions, TrainArgs
from toolkit.data import JSON, DataModule
from toolkit.extension import NO_GROUPS
from toolkit.models.lora_config import LoRAOptions
from toolkit.objectives import NextToken, Objective


def setup(
    checkpoint_dir: str,
    adapters: LoRAOptions = LoRAOptions(),
    data: DataModule = JSON(json_path=""),
    train: TrainArgs = TrainArgs(global_batch_size=FINETUNE.global_batch_size, learning_rate=2e-4, keep_last=2),
    eval: EvalArgs = EvalArgs(max_new_tokens=AUTO),
    optimizer: OptimizerArgs = OptimizerArgs(),
    objective: Objective = NextToken(),
    out_dir: str = "out/finetune/lora",
    precision: Precision | Auto = AUTO,
    shared: RunOptions = RunOptions(),
    groups: Mapping[str, Any] = NO_GROUPS,
) -> None:
    """Train low-rank adapters on the frozen weights of a checkpoint; 3 epochs by default.

    Args:
        checkpoint_dir: The base model, which stays unchanged: a checkpoint folder, or a name below checkpoints/.
        adapters: See :class:`toolkit.models.lora_config.LoRAOptions`.
        data: Training data.
        train: Training options.
        eval: Validation options.
        optimizer: Optimizer options.
        objective: The training objective.
        out_dir: Folder for checkpoints and logs; also on remote storage, such as s3://bucket/run.
        precision: Precision of the base; adapters are fp32. auto: 32-true on CPU, bf16-true on CUDA.
        shared: See :class:`toolkit.config.RunOptions`.
        groups: Options of extensions by group.
    """
    from toolkit.planning.options import check_start
    from toolkit.planning.run_args import run_args

    args = run_args(
        "finetune_lora", shared, adapters, checkpoint_dir=checkpoint_dir,
        data=data, train=train, eval=eval, optimizer=optimizer, objective=objective, out_dir=out_dir,
        precision=precision, groups=groups,
    )  # fmt: skip
    check_start(args)
    from toolkit.training.trainer import run_training  # imports torch

    run_training(args)
