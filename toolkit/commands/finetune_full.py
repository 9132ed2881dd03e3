"""`toolkit finetune_full`: train all weights of a checkpoint further, on instructions or text."""

from __future__ import annotations

from typing import Literal

from toolkit.args import (
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
    timeout: float | None = None,
    seed: int = 42,
) -> None:
    """Train all weights of a checkpoint further, on instructions or text; 3 epochs when no limit is given.

    Args:
        checkpoint_dir: The model to begin with: a checkpoint folder, or a name below checkpoints/.
        data: What to train on.
        train: How to train.
        eval: When to validate.
        log: Names under which a logger files the run.
        optimizer: Which optimizer.
        out_dir: Where checkpoints and logs go.
        resume: Go on from a checkpoint: true (the newest in out_dir), auto (the newest intact one, if there is any), or
            a path.
        verify_checkpoint: Compare files with their checksums before they are used; false also reads edited files.
        tokenizer_dir: A folder with a tokenizer.json; the checkpoint's own when not given.
        accelerator: Where to compute.
        devices: Devices per node; auto takes all GPUs, or one process on a CPU, or what torchrun or SLURM say.
        num_nodes: Machines; one, or what torchrun or SLURM say, when not given.
        strategy: How devices share the work; auto shards the model over them (fsdp), or takes the one there is.
        fsdp: How to shard.
        ddp: How to keep whole copies equal.
        precision: 32-true on a CPU and bf16-mixed on CUDA when not given.
        compiler: Compile the blocks with torch.compile.
        deterministic: Take only algorithms that give the same bits every time: slower on CUDA; a CPU's always do.
        logger_name: Where metrics go besides logs/metrics.csv: tensorboard, wandb, mlflow, or several with commas
            between them; csv is that file alone.
        timeout: Minutes to wait for a process that does not answer; 30 until the first step is done, then 5.
        seed: Chooses the order of the data.
    """
    given = dict(locals())
    from toolkit.training.finetune import finetune

    finetune(FINETUNE_FULL, given)
