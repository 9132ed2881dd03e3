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
