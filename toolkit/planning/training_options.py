"""Define each training command's options as the parameters of a function that returns :class:`RunArgs`.

They are also the command-line flags, and the options of :func:`toolkit.train` and :func:`toolkit.finetune`. Does not
import torch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from toolkit.config import (
    AUTO,
    FINETUNE,
    Auto,
    EvalArgs,
    OptimizerArgs,
    Precision,
    RunOptions,
    TrainArgs,
    TrainingCommand,
)
from toolkit.data import JSON, DataModule, PythonStdlib
from toolkit.extension import NO_GROUPS
from toolkit.models.config import ModelOverrides
from toolkit.models.lora_config import LoRAOptions
from toolkit.objectives import NextToken, Objective
from toolkit.planning.run_args import RunArgs, run_args


def pretrain(
    model_name: str | None = None,
    model_config: ModelOverrides = ModelOverrides(),
    data: DataModule = PythonStdlib(),
    train: TrainArgs = TrainArgs(global_batch_size=64, learning_rate=4e-4, keep_last=3),
    eval: EvalArgs = EvalArgs(),
    optimizer: OptimizerArgs = OptimizerArgs(),
    objective: Objective = NextToken(),
    out_dir: str = "out/pretrain",
    initial_checkpoint_dir: str | None = None,
    precision: Precision | Auto = AUTO,
    shared: RunOptions = RunOptions(),
    groups: Mapping[str, Any] = NO_GROUPS,
) -> RunArgs:
    """Train a language model on text, from scratch or from a checkpoint.

    `toolkit pretrain list` prints the names of the models.

    Args:
        model_name: A named architecture. Default: mini-llama, which trains on any machine.
        model_config: Fields of the named architecture to override.
        data: Training data.
        train: Training options.
        eval: Validation options.
        optimizer: Optimizer options.
        objective: The training objective.
        out_dir: Folder for checkpoints and logs, or a URL such as s3://bucket/run.
        initial_checkpoint_dir: Checkpoint with the initial weights: a folder, or a name below checkpoints/.
        precision: auto: 32-true on CPU, bf16-mixed on CUDA.
        shared: See :class:`toolkit.config.RunOptions`.
        groups: Extension options by group.
    """
    return run_args(
        "pretrain", shared, model_name=model_name, model_config=model_config,
        initial_checkpoint_dir=initial_checkpoint_dir, data=data, train=train, eval=eval, optimizer=optimizer,
        objective=objective, out_dir=out_dir, precision=precision, groups=groups,
    )  # fmt: skip


def finetune_full(
    checkpoint_dir: str,
    data: DataModule = JSON(json_path=""),
    train: TrainArgs = TrainArgs(global_batch_size=FINETUNE.global_batch_size, learning_rate=AUTO, keep_last=2),
    eval: EvalArgs = EvalArgs(max_new_tokens=AUTO),
    optimizer: OptimizerArgs = OptimizerArgs(),
    objective: Objective = NextToken(),
    out_dir: str = "out/finetune/full",
    precision: Precision | Auto = AUTO,
    shared: RunOptions = RunOptions(),
    groups: Mapping[str, Any] = NO_GROUPS,
) -> RunArgs:
    """Finetune all weights of a checkpoint on instructions or text; 3 epochs by default.

    Args:
        checkpoint_dir: Checkpoint of the initial model: a folder, or a name below checkpoints/.
        data: Training data.
        train: Training options.
        eval: Validation options.
        optimizer: Optimizer options.
        objective: The training objective.
        out_dir: Folder for checkpoints and logs, or a URL such as s3://bucket/run.
        precision: auto: 32-true on CPU, bf16-mixed on CUDA.
        shared: See :class:`toolkit.config.RunOptions`.
        groups: Extension options by group.
    """
    return run_args(
        "finetune_full", shared, checkpoint_dir=checkpoint_dir,
        data=data, train=train, eval=eval, optimizer=optimizer, objective=objective, out_dir=out_dir,
        precision=precision, groups=groups,
    )  # fmt: skip


def finetune_lora(
    checkpoint_dir: str,
    adapters: LoRAOptions = LoRAOptions(),
    data: DataModule = JSON(json_path=""),
    train: TrainArgs = TrainArgs(global_batch_size=FINETUNE.global_batch_size, learning_rate=AUTO, keep_last=2),
    eval: EvalArgs = EvalArgs(max_new_tokens=AUTO),
    optimizer: OptimizerArgs = OptimizerArgs(),
    objective: Objective = NextToken(),
    out_dir: str = "out/finetune/lora",
    precision: Precision | Auto = AUTO,
    shared: RunOptions = RunOptions(),
    groups: Mapping[str, Any] = NO_GROUPS,
) -> RunArgs:
    """Train low-rank adapters on the frozen weights of a checkpoint; 3 epochs by default.

    Args:
        checkpoint_dir: Checkpoint of the base model, which does not change: a folder, or a name below checkpoints/.
        adapters: See :class:`toolkit.models.lora_config.LoRAOptions`.
        data: Training data.
        train: Training options.
        eval: Validation options.
        optimizer: Optimizer options.
        objective: The training objective.
        out_dir: Folder for checkpoints and logs, or a URL such as s3://bucket/run.
        precision: Precision of the base; adapters are fp32. auto: 32-true on CPU, bf16-true on CUDA.
        shared: See :class:`toolkit.config.RunOptions`.
        groups: Extension options by group.
    """
    return run_args(
        "finetune_lora", shared, adapters, checkpoint_dir=checkpoint_dir,
        data=data, train=train, eval=eval, optimizer=optimizer, objective=objective, out_dir=out_dir,
        precision=precision, groups=groups,
    )  # fmt: skip


OPTIONS: dict[TrainingCommand, Callable[..., RunArgs]] = {
    "pretrain": pretrain,
    "finetune_full": finetune_full,
    "finetune_lora": finetune_lora,
}
