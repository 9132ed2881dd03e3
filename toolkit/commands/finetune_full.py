"""`toolkit finetune_full`: finetune all weights of a checkpoint on instructions or text."""

from __future__ import annotations

from typing import Any, Literal

from toolkit.config import (
    FINETUNE_FULL,
    Accelerator,
    DDPArgs,
    Devices,
    EvalArgs,
    FSDPArgs,
    LogArgs,
    OptimizerArgs,
    Precision,
    Strategy,
    TrainArgs,
)
from toolkit.data import JSON, DataModule


def setup(
    checkpoint_dir: str,
    data: DataModule = JSON(json_path=""),
    train: TrainArgs = TrainArgs(),
    eval: EvalArgs = EvalArgs(),
    log: LogArgs = LogArgs(),
    optimizer: OptimizerArgs = OptimizerArgs(),
    out_dir: str = FINETUNE_FULL.out_dir,
    resume: bool | str = False,
    verify_checkpoint: bool = True,
    tokenizer_dir: str | None = None,
    accelerator: Accelerator = "auto",
    devices: Devices = "auto",
    num_nodes: int | None = None,
    strategy: Strategy = "auto",
    fsdp: FSDPArgs = FSDPArgs(),
    ddp: DDPArgs = DDPArgs(),
    precision: Precision | None = None,
    compiler: Literal["none", "torch"] = "none",
    deterministic: bool = False,
    logger_name: str = "csv",
    callbacks: str | list[Any] | None = None,
    timeout: float | None = None,
    seed: int = 42,
) -> None:
    """Finetune all weights of a checkpoint on instructions or text; 3 epochs by default.

    Args:
        checkpoint_dir: The initial model: a checkpoint folder, or a name below checkpoints/.
        data: Training data.
        train: Training options.
        eval: Validation options.
        log: Names for loggers: project, run, group.
        optimizer: Optimizer options.
        out_dir: Folder for checkpoints and logs.
        resume: Resume from a checkpoint: true (the newest in out_dir), auto (the newest intact one, if any), or a path.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
        tokenizer_dir: A folder with a tokenizer.json. Default: the checkpoint.
        accelerator: Device type.
        devices: Devices per node. auto: all GPUs, one process on a CPU, or as set by torchrun or SLURM.
        num_nodes: Number of nodes. Default: 1, or as set by torchrun or SLURM.
        strategy: Distributed strategy. auto: fsdp on several devices, single on one.
        fsdp: FSDP options.
        ddp: DDP options.
        precision: Default: 32-true on CPU, bf16-mixed on CUDA.
        compiler: Compile the blocks with torch.compile.
        deterministic: Use deterministic algorithms only: slower on CUDA, no change on CPU.
        logger_name: Loggers besides logs/metrics.csv: tensorboard, wandb, mlflow, or several separated by commas; csv
            adds none.
        callbacks: Class paths of callbacks, separated by commas, such as my_module.MyCallback; in YAML also a list of
            class_path and init_args. See tutorials/extend.md.
        timeout: Minutes before an unresponsive process aborts the run. Default: 30 until the first step, then 5.
        seed: Random seed of the data order.
    """
    given = dict(locals())
    from toolkit.planning.finetune import finetune_args
    from toolkit.training.run import run_training

    run_training(finetune_args(FINETUNE_FULL, given))
