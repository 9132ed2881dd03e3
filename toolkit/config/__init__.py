"""What a user may ask for: option groups that validate themselves. Imports no torch."""

from toolkit.config.options import (
    AUTO,
    FINETUNE,
    PRETRAIN,
    Accelerator,
    Auto,
    Command,
    CommandDefaults,
    DDPArgs,
    Devices,
    Dtype,
    EvalArgs,
    FSDPArgs,
    LogArgs,
    OptimizerArgs,
    Precision,
    RunOptions,
    Strategy,
    TrainArgs,
)

__all__ = [
    "AUTO", "FINETUNE", "PRETRAIN", "Accelerator", "Auto", "Command", "CommandDefaults", "DDPArgs", "Devices", "Dtype",
    "EvalArgs", "FSDPArgs", "LogArgs", "OptimizerArgs", "Precision", "RunOptions", "Strategy", "TrainArgs",
]  # fmt: skip
