"""What a user may ask for: option groups that validate themselves. Imports no torch."""

from toolkit.config.options import (
    AUTO,
    FINETUNE_BATCH,
    Accelerator,
    Auto,
    Command,
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
    "AUTO", "FINETUNE_BATCH", "Accelerator", "Auto", "Command", "DDPArgs", "Devices", "Dtype",
    "EvalArgs", "FSDPArgs", "LogArgs", "OptimizerArgs", "Precision", "RunOptions", "Strategy", "TrainArgs",
]  # fmt: skip
