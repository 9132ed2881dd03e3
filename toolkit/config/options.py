"""Option groups shared by the training commands. Each validates itself; none imports torch.

A default of ``None`` means that the command decides; see :class:`CommandDefaults`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from toolkit.errors import require_option

Accelerator = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"]
Devices = int | Literal["auto"]
Strategy = Literal["auto", "single", "ddp", "fsdp"]
Dtype = Literal["fp32", "bf16", "fp16"]
Auto = Literal["auto"]
AUTO: Auto = "auto"


def _positive(group: str, args: Any, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        require_option(value in (None, AUTO) or value > 0, f"{group}.{name}", value, "must be greater than zero")


def _not_negative(group: str, args: Any, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        require_option(value in (None, AUTO) or value >= 0, f"{group}.{name}", value, "must not be negative")


@dataclass
class TrainArgs:
    """Training.

    Args:
        global_batch_size: Sequences per optimizer step, over all devices. Default: 64 for pretraining, 16 for
            finetuning.
        micro_batch_size: Sequences per forward pass on one device. Default: 4 for pretraining, 1 for finetuning.
        max_steps: Stop after this many optimizer steps.
        max_tokens: Stop at the step that reaches this many input tokens over all devices, without padding.
        epochs: Stop after this many passes over the training data; may be fractional.
        max_time: Stop this launch after this many minutes.
        max_seq_length: Tokens per sequence. Default: the model's context length.
        learning_rate: Peak learning rate. Default: 4e-4 for pretrain, 2e-5 for finetune_full, 2e-4 for finetune_lora.
        lr_schedule: LR schedule after the warm-up. "wsd": warm-up, stable, decay (the last 20 %).
        lr_warmup_steps: Optimizer steps of linear warm-up. Default: 5 % of the run, at most 2,000, for pretraining;
            3 % for finetuning.
        lr_warmup_fraction: Warm-up as a fraction of the run, instead of lr_warmup_steps.
        lr_scaling: Scale learning rates by the ratio of global_batch_size to the command's default.
        min_lr: Learning rate at the end of the schedule. Default: a tenth of the peak.
        max_norm: Gradient clipping norm; 0 disables clipping. Default: 1.0.
        save_interval: Optimizer steps between checkpoints. auto: a fifth of the run, at least 5 steps. 0 saves at the
            end only.
        save_every_minutes: Also save when the last checkpoint is this many minutes old; null disables. auto: 10, or a
            fifth of max_time if that is less, with save_interval auto; otherwise null.
        keep_last: Number of step checkpoints to keep; 0 keeps all. Default: 3 for pretraining, 2 for finetuning.
        keep_best: Also keep the checkpoint with the lowest validation loss, as the folder "best".
        patience: Stop after this many validations in a row without a new lowest validation loss. Default: off.
        log_interval: Optimizer steps between rows of metrics.
        tie_embeddings: Tie the weights of embedding and head. Default: as the model's config.
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
    patience: int | None = None
    log_interval: int = 1
    tie_embeddings: bool | None = None

    def __post_init__(self) -> None:
        _positive(
            "train", self, "global_batch_size", "micro_batch_size", "max_steps", "max_tokens", "epochs", "max_time",
            "max_seq_length", "learning_rate", "save_every_minutes", "log_interval", "patience",
        )  # fmt: skip
        _not_negative("train", self, "lr_warmup_steps", "min_lr", "max_norm", "save_interval", "keep_last")
        fraction = self.lr_warmup_fraction
        require_option(
            fraction is None or 0 <= fraction < 1,
            "train.lr_warmup_fraction", fraction, "must be at least 0 and less than 1",
        )  # fmt: skip
        require_option(
            fraction is None or self.lr_warmup_steps is None,
            "train.lr_warmup_fraction", fraction, "give either this or --train.lr_warmup_steps, not both",
        )  # fmt: skip


@dataclass
class EvalArgs:
    """Validation.

    Args:
        interval: Optimizer steps between validations. auto: a tenth of the run, at least 5 steps, and each tenth of
            max_time. 0 validates at the end only.
        max_iters: Maximum number of global batches per validation; null uses all held-out data.
        initial_validation: Validate before the first step.
        final_validation: Validate after the last step.
        max_new_tokens: Tokens to generate from a sample prompt at each validation; 0 disables. Default: 64 for
            finetuning, 0 for pretraining.
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
    """Names for external loggers.

    Args:
        project: Project (W&B) or experiment (MLflow).
        run: Name of this run.
        group: Group of this run (W&B).
    """

    project: str = "toolkit"
    run: str | None = None
    group: str | None = None


@dataclass
class OptimizerArgs:
    """Optimizer.

    Args:
        name: Name of a torch.optim class.
        weight_decay: Weight decay of matrices; biases, norms and embeddings do not decay. Default: 0.1 for pretraining,
            0 for finetuning.
        betas: Decay rates of the moments, for optimizers that have them. Default: 0.9 and 0.95 for pretraining, 0.9 and
            0.999 for finetuning.
        eps: Added to the denominator, for optimizers that have it. Default: the optimizer's.
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
        require_option(
            self.betas is None or all(0 <= b < 1 for b in self.betas),
            "optimizer.betas", self.betas, "must be two numbers from 0 (inclusive) to 1 (exclusive)",
        )  # fmt: skip


@dataclass
class FSDPArgs:
    """FSDP.

    Args:
        sharding_strategy: HYBRID_SHARD shards over the devices of a node and replicates over nodes; FULL_SHARD shards
            over all devices; SHARD_GRAD_OP shards gradients and optimizer, but keeps the weights unsharded between
            forward and backward; NO_SHARD is ddp.
        state_dict_type: Checkpoint format. full: one file; sharded: one file per device, faster for large models. All
            commands read both.
        param_dtype: Compute dtype of the blocks' weights. Default: as --precision.
        reduce_dtype: Dtype of gradient reduction. Default: fp32 under mixed precision.
        buffer_dtype: Dtype of buffers, for models that have them. Default: fp32 under mixed precision.
        backward_prefetch: All-gather the next block's weights before ("pre") or after ("post") the current gradient
            reduction.
        forward_prefetch: Issue the next block's all-gather before the current block's forward pass.
        limit_all_gathers: Keep at most two blocks' unsharded weights in memory.
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
    """Distributed data parallel (DDP).

    Args:
        bucket_cap_mb: Size of the gradient all-reduce buckets in MB.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves a copy.
    """

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = True

    def __post_init__(self) -> None:
        _positive("ddp", self, "bucket_cap_mb")


@dataclass(frozen=True)
class CommandDefaults:
    """Defaults of a training command.

    The warm-up is a fraction of the run, at most ``max_warmup_steps``. ``train``, ``eval`` and ``optimizer`` fill in
    the ``None`` fields of the groups of the same name. ``length`` applies to runs without a limit: to all of them with
    ``length_for_all``, otherwise only to the default model.
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
    """Return a copy of the dataclass ``args`` with ``None`` fields replaced by ``defaults``."""
    known = {f.name for f in fields(args)}
    assert defaults.keys() <= known, defaults.keys() - known
    missing = {k: v for k, v in defaults.items() if getattr(args, k) is None}
    return replace(args, **missing)
