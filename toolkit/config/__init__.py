"""What a user may ask for: option groups that validate themselves. Imports no torch."""

from toolkit.config.options import (
    AUTO,
    FINETUNE_FULL,
    FINETUNE_LORA,
    PRETRAIN,
    Accelerator,
    Auto,
    CommandDefaults,
    DDPArgs,
    Devices,
    Dtype,
    EvalArgs,
    FSDPArgs,
    LogArgs,
    OptimizerArgs,
    Precision,
    Strategy,
    TrainArgs,
    fill,
)

__all__ = [
    "AUTO", "FINETUNE_FULL", "FINETUNE_LORA", "PRETRAIN", "Accelerator", "Auto", "CommandDefaults", "DDPArgs",
    "Devices", "Dtype", "EvalArgs", "FSDPArgs", "LogArgs", "OptimizerArgs", "Precision", "Strategy", "TrainArgs",
    "fill",
]  # fmt: skip
