"""Option groups that validate themselves. Imports no torch."""

from toolkit.config.options import (
    COMPILERS,
    FINETUNE,
    OPTIMIZER_SHORTHANDS,
    PRETRAIN,
    STRATEGIES,
    Accelerator,
    ActivationCheckpointing,
    CommandDefaults,
    EvalArgs,
    LogArgs,
    OptimizerArgs,
    Precision,
    ProfilerArgs,
    RunOptions,
    Strategy,
    TrainArgs,
    TrainingCommand,
    none_if_auto,
)
from toolkit.config.strategy_options import AUTO, Auto, DDPArgs, Dtype, FSDPArgs, PipelineArgs

__all__ = [
    "AUTO", "COMPILERS", "FINETUNE", "OPTIMIZER_SHORTHANDS", "PRETRAIN", "STRATEGIES", "Accelerator",
    "ActivationCheckpointing", "Auto", "CommandDefaults", "DDPArgs", "Dtype", "EvalArgs", "FSDPArgs", "LogArgs",
    "OptimizerArgs", "PipelineArgs", "Precision", "ProfilerArgs", "RunOptions", "Strategy", "TrainArgs",
    "TrainingCommand", "none_if_auto",
]  # fmt: skip
