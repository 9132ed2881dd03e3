"""`toolkit finetune_lora`: train low-rank adapters beside the frozen weights of a checkpoint."""

from __future__ import annotations

from typing import Literal

from toolkit.args import (
    FINETUNE_LORA,
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
    lora_r: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    lora_query: bool = True,
    lora_key: bool = False,
    lora_value: bool = True,
    lora_projection: bool = False,
    lora_mlp: bool = False,
    lora_head: bool = False,
    lora_rslora: bool = False,
    lora_dora: bool = False,
    from_peft: str | None = None,
    quantize: Literal["bnb.nf4", "bnb.nf4-dq"] | None = None,
    data: DataModule = JSON(json_path=""),
    train: TrainArgs = TrainArgs(),
    eval: EvalArgs = EvalArgs(),
    log: LogArgs = LogArgs(),
    optimizer: OptimizerArgs = OptimizerArgs(),
    out_dir: str = FINETUNE_LORA.out_dir,
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
    """Train low-rank adapters beside the frozen weights of a checkpoint; 3 epochs when no limit is given.

    Args:
        checkpoint_dir: The base, which stays as it is: a checkpoint folder, or a name below checkpoints/.
        lora_r: Rank of the adapters.
        lora_alpha: The adapters' share is multiplied by lora_alpha / lora_r.
        lora_dropout: Chance for each input of the adapters to be left out of a training step.
        lora_query: Adapt the queries of the attention.
        lora_key: Adapt its keys.
        lora_value: Adapt its values.
        lora_projection: Adapt its output projection.
        lora_mlp: Adapt every linear layer of the MLP.
        lora_head: Adapt the language model's head.
        lora_rslora: Multiply by lora_alpha / sqrt(lora_r) instead, so that higher ranks learn as fast.
        lora_dora: Train the norms of the rows beside their directions (DoRA).
        from_peft: Begin with the adapters of this folder of peft's, which says what is adapted.
        quantize: Hold the base in 4 bits: bnb.nf4, or bnb.nf4-dq, whose scales are quantised as well.
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
        strategy: How devices share the work; auto shards the base over them (fsdp), or takes the one there is.
        fsdp: How to shard.
        ddp: How to keep whole copies equal.
        precision: Of the base; 32-true on a CPU and bf16-true on CUDA when not given. Adapters are fp32.
        compiler: Compile the blocks with torch.compile.
        deterministic: Take only algorithms that give the same bits every time: slower on CUDA; a CPU's always do.
        logger_name: Where metrics go besides logs/metrics.csv: tensorboard, wandb, mlflow, or several with commas
            between them; csv is that file alone.
        timeout: Minutes to wait for a process that does not answer; 30 until the first step is done, then 5.
        seed: Chooses the initial adapters and the order of the data.
    """
    given = dict(locals())
    from toolkit.training.finetune import finetune

    finetune(FINETUNE_LORA, given)
