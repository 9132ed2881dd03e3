"""`toolkit finetune_lora`: train low-rank adapters on the frozen weights of a checkpoint."""

from __future__ import annotations

from typing import Any, Literal

from toolkit.config import AUTO, FINETUNE, Auto, EvalArgs, OptimizerArgs, Precision, RunOptions, TrainArgs
from toolkit.data import JSON, DataModule
from toolkit.extension import take_option_groups
from toolkit.objectives import NextToken, Objective


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
    loraplus_lr_ratio: float = 1.0,
    from_peft: str | None = None,
    quantize: Literal["bnb.nf4", "bnb.nf4-dq"] | None = None,
    data: DataModule = JSON(json_path=""),
    train: TrainArgs = TrainArgs(global_batch_size=FINETUNE.global_batch_size, learning_rate=2e-4, keep_last=2),
    eval: EvalArgs = EvalArgs(max_new_tokens=AUTO),
    optimizer: OptimizerArgs = OptimizerArgs(),
    objective: Objective = NextToken(),
    out_dir: str = "out/finetune/lora",
    precision: Precision | Auto = AUTO,
    **shared: Any,
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
        loraplus_lr_ratio: LoRA+ (Hayou et al. 2024): learning rate of B relative to that of A, such as 16.
        from_peft: Start from the adapters in this peft folder, which also determines the adapted layers.
        quantize: Quantize the base to 4 bits: bnb.nf4, or bnb.nf4-dq with quantized scales (double quantization).
        data: Training data.
        train: Training options.
        eval: Validation options.
        optimizer: Optimizer options.
        objective: What the run minimizes.
        out_dir: Folder for checkpoints and logs; also on remote storage, such as s3://bucket/run.
        precision: Precision of the base; adapters are fp32. auto: 32-true on CPU, bf16-true on CUDA.
        shared: See :class:`toolkit.config.RunOptions`.
    """
    groups = take_option_groups(shared)
    options = locals() | vars(RunOptions(**shared))
    from toolkit.planning.run_args import run_args
    from toolkit.training.run import run_training

    run_training(run_args("finetune_lora", options))


setup.optional = ("data",)  # type: ignore[attr-defined]  # a missing checkpoint_dir is reported first
