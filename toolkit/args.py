"""The groups of options that the training commands share. Each validates itself; none imports torch.

A default of ``None`` means "the command decides": the table of defaults is in :data:`DEFAULTS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from toolkit.errors import UserError

Accelerator = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"]
Devices = int | Literal["auto"]
Strategy = Literal["auto", "single", "ddp", "fsdp"]
Dtype = Literal["fp32", "bf16", "fp16"]
Auto = Literal["auto"]
AUTO: Auto = "auto"


def _require(ok: bool, flag: str, value: Any, hint: str) -> None:
    if not ok:
        raise UserError(f"--{flag} {value}: {hint}")


def _positive(group: str, args: Any, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        _require(value in (None, AUTO) or value > 0, f"{group}.{name}", value, "must be greater than zero")


def _not_negative(group: str, args: Any, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        _require(value in (None, AUTO) or value >= 0, f"{group}.{name}", value, "must not be negative")


@dataclass
class TrainArgs:
    """How to train.

    Args:
        global_batch_size: Sequences per optimizer step, over all devices; pretraining takes 64 when not given,
            finetuning 16.
        micro_batch_size: Sequences per forward pass on one device; pretraining takes 4, finetuning 1.
        max_steps: Stop after this many optimizer steps.
        max_tokens: Stop with the step that reaches this many input tokens over all devices, padding left out.
        epochs: Stop after this many passes over the training data; a fraction is fine.
        max_time: Stop this launch after so many minutes.
        max_seq_length: Tokens per sequence; the model's context length when not given.
        learning_rate: The peak learning rate; pretraining takes 4e-4, finetune_full 2e-5, finetune_lora 2e-4.
        lr_schedule: Shape of the learning rate after the warm-up. "wsd" is warm-up, stable, decay (the last 20 %).
        lr_warmup_steps: Optimizer steps of linear warm-up; pretraining takes 5 % of the run, at most 2,000, finetuning
            3 %.
        lr_warmup_fraction: Warm-up as a share of the run; the command's default when neither is given.
        lr_scaling: Scale learning rates with global_batch_size over the command's default batch.
        min_lr: The learning rate at the end of the schedule; a tenth of the peak when not given.
        max_norm: Clip the norm of the gradient to this value, 1.0 when not given; 0 switches clipping off.
        save_interval: Optimizer steps between checkpoints; auto is a fifth of the run, at least 5 steps. 0 saves at the
            end only.
        save_every_minutes: Also save when this many minutes have passed since the last checkpoint; null never does.
            auto is 10 (a fifth of max_time, where that is less) with save_interval auto, else null.
        keep_last: How many step checkpoints to keep; pretraining takes 3, finetuning 2. 0 keeps all.
        keep_best: Also keep the checkpoint with the lowest validation loss, as the folder "best".
        log_interval: Optimizer steps between two rows of metrics.
        tie_embeddings: Share the weight of embedding and head; the model's own choice when not given.
    """

    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    max_steps: int | None = None
    max_tokens: int | None = None
    epochs: float | None = None
    max_time: float | None = None
    max_seq_length: int | None = None
    learning_rate: float | None = None
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    lr_warmup_steps: int | None = None
    lr_warmup_fraction: float | None = None
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    min_lr: float | None = None
    max_norm: float | None = None
    save_interval: int | Auto = AUTO
    save_every_minutes: float | Auto | None = AUTO
    keep_last: int | None = None
    keep_best: bool = False
    log_interval: int = 1
    tie_embeddings: bool | None = None

    def __post_init__(self) -> None:
        _positive(
            "train", self, "global_batch_size", "micro_batch_size", "max_steps", "max_tokens", "epochs", "max_time",
            "max_seq_length", "learning_rate", "save_every_minutes", "log_interval",
        )  # fmt: skip
        _not_negative("train", self, "lr_warmup_steps", "min_lr", "max_norm", "save_interval", "keep_last")
        fraction = self.lr_warmup_fraction
        _require(
            fraction is None or 0 <= fraction < 1,
            "train.lr_warmup_fraction", fraction, "must be at least 0 and less than 1",
        )  # fmt: skip
        _require(
            fraction is None or self.lr_warmup_steps is None,
            "train.lr_warmup_fraction", fraction, "give either this or --train.lr_warmup_steps, not both",
        )  # fmt: skip


@dataclass
class EvalArgs:
    """When to validate, and how long the text is that the model says then.

    Args:
        interval: Optimizer steps between validations; auto is a tenth of the run, at least 5 steps, and also validates
            after each tenth of max_time. 0 validates at the end only.
        max_iters: At most so many global batches per validation; all of the held-out data when null.
        initial_validation: Validate once before the first step.
        final_validation: Validate once after the last step.
        max_new_tokens: At every validation, print so many tokens with which the model goes on from one fixed prompt of
            the data; finetuning takes 64, pretraining 0, which is none.
    """

    interval: int | Auto = AUTO
    max_iters: int | None = 10
    initial_validation: bool = False
    final_validation: bool = True
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        _not_negative("eval", self, "interval", "max_new_tokens")
        _positive("eval", self, "max_iters")


@dataclass
class LogArgs:
    """Names under which a logger files the run.

    Args:
        project: The project (W&B) or experiment (MLflow).
        run: The name of this run.
        group: The group of this run (W&B).
    """

    project: str = "toolkit"
    run: str | None = None
    group: str | None = None


@dataclass
class OptimizerArgs:
    """Which optimizer.

    Args:
        name: The name of any class of torch.optim.
        weight_decay: Decay of weight matrices; biases, norms and embeddings are spared. Pretraining takes 0.1,
            finetuning 0.
        betas: Decay rates of the moments, for optimizers that have them; pretraining takes 0.9 and 0.95, finetuning
            0.9 and 0.999.
        eps: Added to the denominator, for optimizers that have it; the optimizer's own default when not given.
        options: Further keyword arguments of the class, for example '{"momentum": 0.9}'.
    """

    name: str = "AdamW"
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _not_negative("optimizer", self, "weight_decay")
        _positive("optimizer", self, "eps")
        _require(
            self.betas is None or all(0 <= b < 1 for b in self.betas),
            "optimizer.betas", self.betas, "must be two numbers from 0 to below 1",
        )  # fmt: skip


@dataclass
class FSDPArgs:
    """How to shard.

    Args:
        sharding_strategy: HYBRID_SHARD shards over the devices of a node and replicates over nodes; FULL_SHARD shards
            over all devices; SHARD_GRAD_OP shards gradients and optimizer, but keeps the weights whole between forward
            and backward; NO_SHARD is ddp.
        state_dict_type: One file per checkpoint, or one per device: faster for large models, read everywhere.
        param_dtype: Weights of the blocks while they compute; by --precision when not given.
        reduce_dtype: Gradients while they are summed over devices; fp32 under mixed precision when not given.
        buffer_dtype: Buffers, where a model has them; fp32 under mixed precision when not given.
        backward_prefetch: Gather the next block's weights before or after the gradient of the one before is reduced.
        forward_prefetch: Ask for the next block's weights before the block's forward pass.
        limit_all_gathers: Hold at most two blocks' whole weights, instead of as many as the CPU runs ahead.
    """

    sharding_strategy: Literal["HYBRID_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = "HYBRID_SHARD"
    state_dict_type: Literal["full", "sharded"] = "full"
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True


@dataclass
class DDPArgs:
    """How to keep whole copies of the model equal.

    Args:
        bucket_cap_mb: Gradients are summed over devices in buckets of this size.
        gradient_as_bucket_view: Let gradients live in the buckets: saves a copy of them.
    """

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = True

    def __post_init__(self) -> None:
        _positive("ddp", self, "bucket_cap_mb")


@dataclass(frozen=True)
class CommandDefaults:
    """What a training command sets where the user did not.

    The warm-up is a share of the run, ``max_warmup_steps`` at the most. ``train``, ``eval`` and ``optimizer`` fill in
    the ``None`` fields of the groups of the same name. ``length`` ends a run that was given no limit: any run with
    ``length_for_all``, else only that of the default model.
    """

    out_dir: str
    train: dict[str, Any]
    eval: dict[str, Any]
    optimizer: dict[str, Any]
    length: dict[str, Any]
    length_for_all: bool
    warmup_fraction: float
    max_warmup_steps: int
    cuda_precision: Precision = "bf16-mixed"


PRETRAIN = CommandDefaults(
    out_dir="out/pretrain",
    train={
        "global_batch_size": 64, "micro_batch_size": 4, "learning_rate": 4e-4, "max_norm": 1.0, "keep_last": 3,
    },
    eval={"max_new_tokens": 0},
    optimizer={"weight_decay": 0.1, "betas": (0.9, 0.95)},
    length={"max_tokens": 700_000},
    length_for_all=False,
    warmup_fraction=0.05,
    max_warmup_steps=2000,
)  # fmt: skip

FINETUNE_FULL = CommandDefaults(
    out_dir="out/finetune/full",
    train={
        "global_batch_size": 16, "micro_batch_size": 1, "learning_rate": 2e-5, "max_norm": 1.0, "keep_last": 2,
    },
    eval={"max_new_tokens": 64},
    optimizer={"weight_decay": 0.0, "betas": (0.9, 0.999)},
    length={"epochs": 3.0},
    length_for_all=True,
    warmup_fraction=0.03,
    max_warmup_steps=10**9,
)  # fmt: skip

FINETUNE_LORA = replace(
    FINETUNE_FULL,
    out_dir="out/finetune/lora",
    train=FINETUNE_FULL.train | {"learning_rate": 2e-4},
    cuda_precision="bf16-true",
)


def fill(args: Any, defaults: dict[str, Any]) -> Any:
    """Return a copy of the dataclass ``args`` whose ``None`` fields are taken from ``defaults``."""
    known = {f.name for f in fields(args)}
    assert defaults.keys() <= known, defaults.keys() - known
    missing = {k: v for k, v in defaults.items() if getattr(args, k) is None}
    return replace(args, **missing)
