"""`toolkit finetune_lora`: train low-rank adapters on the frozen weights of a checkpoint."""

from __future__ import annotations

from typing import Any, Literal

from toolkit.config import (
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
    callbacks: str | list[Any] | None = None,
    timeout: float | None = None,
    seed: int = 42,
) -> None:
    """Train low-rank adapters on the frozen weights of a checkpoint; 3 epochs by default.

    Args:
        checkpoint_dir: The base model, which stays unchanged: a checkpoint folder, or a name below checkpoints/.
        lora_r: Rank of the adapters.
        lora_alpha: LoRA scaling is lora_alpha / lora_r.
        lora_dropout: LoRA dropout probability.
        lora_query: Adapt the query projections.
        lora_key: Adapt the key projections.
        lora_value: Adapt the value projections.
        lora_projection: Adapt the attention output projections.
        lora_mlp: Adapt all linear layers of the MLP.
        lora_head: Adapt the language model head.
        lora_rslora: Rank-stabilized LoRA: scaling is lora_alpha / sqrt(lora_r).
        lora_dora: DoRA: also train the magnitude of each row.
        from_peft: Start from the adapters in this peft folder, which also determines the adapted layers.
        quantize: Quantize the base to 4 bits: bnb.nf4, or bnb.nf4-dq with quantized scales (double quantization).
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
        precision: Precision of the base. Default: 32-true on CPU, bf16-true on CUDA. Adapters are fp32.
        compiler: Compile the blocks with torch.compile.
        deterministic: Use deterministic algorithms only: slower on CUDA, no change on CPU.
        logger_name: Loggers besides logs/metrics.csv: tensorboard, wandb, mlflow, or several separated by commas; csv
            adds none.
        callbacks: Class paths of callbacks, separated by commas, such as my_module.MyCallback; in YAML also a list of
            class_path and init_args. See tutorials/extend.md.
        timeout: Minutes before an unresponsive process aborts the run. Default: 30 until the first step, then 5.
        seed: Random seed of initial adapters and data order.
    """
    given = dict(locals())
    from toolkit.planning.finetune import finetune_args
    from toolkit.training.run import run_training

    run_training(finetune_args(FINETUNE_LORA, given))
