"""Option groups that validate themselves. Imports no torch."""

from toolkit.config.options import (
    AUTO,
    COMPILERS,
    FINETUNE,
    PRETRAIN,
    STRATEGIES,
    Accelerator,
    ActivationCheckpointing,
    Auto,
    CommandDefaults,
    DDPArgs,
    Dtype,
    EvalArgs,
    FSDPArgs,
    LogArgs,
    OptimizerArgs,
    PipelineArgs,
    Precision,
    ProfilerArgs,
    RunOptions,
    Strategy,
    TrainArgs,
    TrainingCommand,
    none_if_auto,
)

__all__ = [
    "AUTO", "COMPILERS", "FINETUNE", "PRETRAIN", "STRATEGIES", "Accelerator", "ActivationCheckpointing", "Auto",
    "CommandDefaults", "DDPArgs", "Dtype", "EvalArgs", "FSDPArgs", "LogArgs", "OptimizerArgs", "PipelineArgs",
    "Precision", "ProfilerArgs", "RunOptions", "Strategy", "TrainArgs", "TrainingCommand", "none_if_auto",
]  # fmt: skip
