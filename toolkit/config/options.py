"""Options of the training commands, in groups that validate themselves. Imports no torch.

Defaults are pretrain's; the finetuning commands override some in their signatures. ``None`` means off or
unlimited. "auto" is resolved by :mod:`toolkit.planning`, as the help of the option describes.

The checks are in ``__post_init__`` rather than in the types, so they also apply to groups created in Python.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

from toolkit.config.checks import require_not_negative, require_one_of, require_positive
from toolkit.config.metric_options import MetricArgs
from toolkit.config.strategy_options import AUTO, Auto, DDPArgs, FSDPArgs, PipelineArgs
from toolkit.errors import require_option

T = TypeVar("T")
Accelerator = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["32-true", "bf16-true", "bf16-master", "bf16-mixed", "16-mixed"]
TrainingCommand = Literal["pretrain", "finetune_full", "finetune_lora"]
Strategy = Literal["auto", "single", "ddp", "fsdp", "fsdp2"]
ActivationCheckpointing = Literal["none", "selective", "full"]
DEFAULT_SEED = 42
STRATEGIES: tuple[str, ...] = get_args(Strategy)
COMPILERS = (AUTO, "none", "torch")


@dataclass(frozen=True)
class CommandDefaults:
    """Defaults that depend on the command. Planning applies them to "auto" options.

    Args:
        global_batch_size: Sequences per optimizer step; ``lr_scaling`` is relative to it.
        micro_batch_size: Sequences per forward pass on one device, if the run's memory is unknown.
        epochs: Epochs of a run without a limit; None requires a limit.
        warmup: LR warm-up as a fraction of the run.
        max_warmup_steps: Maximum optimizer steps of the warm-up.
        weight_decay, betas: Passed to optimizers that have them.
    """

    global_batch_size: int
    micro_batch_size: int
    epochs: float | None
    warmup: float
    max_warmup_steps: float
    weight_decay: float
    betas: tuple[float, float]


PRETRAIN = CommandDefaults(64, 4, None, warmup=0.05, max_warmup_steps=2000, weight_decay=0.1, betas=(0.9, 0.95))
FINETUNE = CommandDefaults(16, 1, 3.0, warmup=0.03, max_warmup_steps=math.inf, weight_decay=0.0, betas=(0.9, 0.999))


def none_if_auto(value: T | Auto) -> T | None:
    """Return None for "auto", otherwise the value."""
    return None if value == AUTO else cast("T", value)


@dataclass(frozen=True)
class TrainArgs:
    """Training options.

    Args:
        global_batch_size: Sequences per optimizer step, over all devices.
        micro_batch_size: Sequences per forward pass on one device. auto: on CUDA the largest size whose estimated
            memory leaves 15 % of the device free, at most 65,536 tokens; otherwise at most 4 in pretraining and 1 in
            finetuning.
        max_steps: Stop after this many optimizer steps.
        max_tokens: Stop at the step that reaches this many input tokens over all devices, without padding.
        epochs: Stop after this many passes over the training data; may be fractional. Without any limit, finetuning
            ends after 3, on preferences after 1; a named architecture trained from scratch ends after 4, or after 20
            tokens per active parameter if that is less.
        max_time: As the only limit, the run's budget: minutes of training steps over all launches, without start-up,
            validation and saving; warm-up and decay follow the share that is used. With another limit, stop this
            launch after this many minutes.
        max_seq_length: Tokens per sequence. auto: the model's context length.
        learning_rate: Peak learning rate. auto: 2e-4 for adapters, 2e-5 in finetune_full; with preferences 5e-6 and
            5e-7.
        lr_schedule: LR schedule after the warm-up. "wsd": warm-up, stable, decay (the last 20 %).
        lr_warmup_steps: Optimizer steps of linear warm-up. auto: 5 % of the run, at most 2,000, for pretraining; 3 %
            for finetuning; with a budget of time that share of it.
        lr_warmup_fraction: Warm-up as a fraction of the run, instead of lr_warmup_steps.
        lr_scaling: Scale learning rates by the ratio of global_batch_size to lr_base_batch, or by its square root, and
            divide the warm-up steps by that ratio. sqrt suits Adam, linear suits SGD.
        lr_base_batch: Global batch size for which learning_rate and warm-up were tuned. auto: the default batch size.
        min_lr: Learning rate at the end of the schedule. auto: a tenth of the peak.
        max_norm: Gradient clipping norm; 0 disables clipping.
        skip_spikes: Skip the update if the loss or the gradient norm is more than this many standard deviations over
            the mean of the last 128 steps, once there are 64; null disables.
        max_skipped: Stop with an error after more than this many steps in a row without an update.
        activation_checkpointing: Recompute activations in the backward pass to save memory. selective: save the outputs
            of attention and every second matrix product; full: save only the inputs of the blocks.
        fp8: Compute the linear layers of the blocks in fp8 (torchao). tensorwise: one scale per matrix, the fastest;
            rowwise: one per row, more accurate. Needs --precision bf16-mixed or bf16-true.
        residual_dtype: Dtype of the residual stream. auto: the weights' dtype; bf16: half its memory and traffic, with
            a rounding after each addition. Needs --precision bf16-mixed.
        save_interval: Optimizer steps between checkpoints. auto: a fifth of the run, at least 5 steps. 0 saves at the
            end only.
        save_every_minutes: Also save when the last checkpoint is this many minutes old; null disables. auto: 10 with
            save_interval auto, otherwise null.
        async_save: Continue training while a step checkpoint is written from a copy of the state in host memory.
        keep_last: Number of step checkpoints to keep; 0 keeps all.
        keep_best: Also keep the checkpoint with the lowest validation loss, or the best by eval.best_by, as the folder
            "best".
        patience: Stop after this many validations in a row without a new lowest validation loss, or without a new best
            value of eval.best_by; null disables.
        log_interval: Optimizer steps between rows of metrics.
        tie_embeddings: Tie the weights of embedding and head; null keeps the model's config.
        ema: Decay rate per step of an exponential moving average of the weights, such as 0.999. Validation, samples
            and checkpoints use the average; null disables.
        neftune_alpha: Add uniform noise to the embeddings in finetuning, of at most alpha / sqrt(T * n_embd) for a
            sample of T tokens, such as 5; null disables.
    """

    global_batch_size: int = PRETRAIN.global_batch_size
    micro_batch_size: int | Auto = AUTO
    max_steps: int | None = None
    max_tokens: int | None = None
    epochs: float | None = None
    max_time: float | None = None
    max_seq_length: int | Auto = AUTO
    learning_rate: float | Auto = 4e-4
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    lr_warmup_steps: int | Auto = AUTO
    lr_warmup_fraction: float | None = None
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    lr_base_batch: int | Auto = AUTO
    min_lr: float | Auto = AUTO
    max_norm: float = 1.0
    skip_spikes: float | None = None
    max_skipped: int = 50
    activation_checkpointing: ActivationCheckpointing = "none"
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    residual_dtype: Literal["auto", "bf16"] = AUTO
    save_interval: int | Auto = AUTO
    save_every_minutes: float | Auto | None = AUTO
    async_save: bool = False
    keep_last: int = 3
    keep_best: bool = False
    patience: int | None = None
    log_interval: int = 1
    tie_embeddings: bool | None = None
    ema: float | None = None
    neftune_alpha: float | None = None

    @property
    def peak_learning_rate(self) -> float:
        """``learning_rate`` after :func:`toolkit.planning.training_options.run_args` has replaced auto."""
        assert self.learning_rate != AUTO
        return cast("float", self.learning_rate)

    @property
    def budget_seconds(self) -> float | None:
        """The run's budget of training time, if ``max_time`` is its only limit."""
        if self.max_time is None or {self.max_steps, self.max_tokens, self.epochs} != {None}:
            return None
        return 60 * self.max_time

    def __post_init__(self) -> None:
        require_positive(
            "train", self, "global_batch_size", "micro_batch_size", "max_steps", "max_tokens", "epochs", "max_time",
            "max_seq_length", "learning_rate", "lr_base_batch", "save_every_minutes", "log_interval", "patience",
            "skip_spikes", "neftune_alpha",
        )  # fmt: skip
        require_not_negative(
            "train", self, "lr_warmup_steps", "min_lr", "max_norm", "max_skipped", "save_interval", "keep_last"
        )
        name, fraction = "train.lr_warmup_fraction", self.lr_warmup_fraction
        both = fraction is not None and self.lr_warmup_steps != AUTO
        require_option(fraction is None or 0 <= fraction < 1, name, fraction, "must be at least 0 and less than 1")
        require_option(not both, name, fraction, "is not supported with --train.lr_warmup_steps; remove one of them")
        name, base = "train.lr_base_batch", self.lr_base_batch
        is_used = base == AUTO or self.lr_scaling != "none"
        require_option(is_used, name, base, "has no effect without --train.lr_scaling sqrt or linear")
        is_valid = self.ema is None or 0 < self.ema < 1
        require_option(is_valid, "train.ema", self.ema, "must be between 0 and 1, such as 0.999")
        saves_steps = self.save_interval != 0 or self.save_every_minutes not in (None, AUTO)
        hint = "has no effect, because only the end of the run is saved; set --train.save_interval"
        require_option(not self.async_save or saves_steps, "train.async_save", "true", hint)


@dataclass(frozen=True)
class EvalArgs(MetricArgs):
    """Validation options.

    Args:
        interval: Optimizer steps between validations. auto: a tenth of the run, at least 5 steps, and each tenth of
            max_time, unless that takes more than a tenth of the time. 0 validates at the end only.
        max_iters: Maximum number of global batches per validation; null uses all held-out data.
        initial_validation: Validate before the first step.
        final_validation: Validate after the last step.
        max_new_tokens: Tokens to generate from a sample prompt at each validation; 0 disables. auto: 64, at most half
            of the model's context.
        best_by: Metric of a validation that decides for train.keep_best and train.patience, such as val_bpb or a
            callback's. auto: val_loss, or what the objective has.
        best_mode: Whether the highest (max) or the lowest (min) value of best_by is the best. auto: min for losses,
            errors, val_ppl and val_bpb, otherwise as the metric declares (higher_is_better).
        tasks: lm-eval tasks to run at each validation, separated by commas, in a process with transformers on a
            temporary export of the model.
        tasks_path: A folder with custom task files.
    """

    interval: int | Auto = AUTO
    max_iters: int | None = 10
    initial_validation: bool = False
    final_validation: bool = True
    max_new_tokens: int | Auto = 0
    best_by: str = AUTO
    best_mode: Literal["auto", "max", "min"] = AUTO
    tasks: str | None = None
    tasks_path: str | None = None

    def __post_init__(self) -> None:
        require_not_negative("eval", self, "interval", "max_new_tokens")
        require_positive("eval", self, "max_iters")
        super().__post_init__()
        self._require_user("tasks_path", "tasks")


@dataclass(frozen=True)
class LogArgs:
    """Output format, and names for external loggers.

    Args:
        project: Project (W&B, trackio) or experiment (MLflow).
        run: Name of this run.
        group: Group of this run (W&B, trackio).
        format: Standard output. text: a panel on a terminal, lines elsewhere; json: one JSON object per line, and
            everything else on standard error.
        price: Price of a kWh, for the cost of the run's energy; null does not print it.
    """

    project: str = "toolkit"
    run: str | None = None
    group: str | None = None
    format: Literal["text", "json"] = "text"
    price: float | None = None

    def __post_init__(self) -> None:
        require_positive("log", self, "price")


OPTIMIZER_SHORTHANDS = ("weight_decay", "betas", "eps")
"""Options of optimizers that are fields of :class:`OptimizerArgs`."""


@dataclass(frozen=True)
class OptimizerArgs:
    """Optimizer options.

    Args:
        name: Name of a torch.optim class, Muon, AdamW8bit, AdamWScheduleFree or SOAP. Muon updates the matrices of the
            blocks, AdamW the other weights; AdamW8bit has 8-bit moments (bitsandbytes); AdamWScheduleFree averages the
            weights instead of decaying the learning rate (schedulefree); SOAP is pytorch_optimizer's.
        weight_decay: Weight decay of matrices; biases, norms and embeddings do not decay. auto: 0.1 for pretraining and
            0 for finetuning, if the optimizer has it.
        betas: Decay rates of the moments. auto: 0.9 and 0.95 for pretraining, 0.9 and 0.999 for finetuning, if the
            optimizer has them.
        eps: Added to the denominator, for optimizers that have it. auto: the optimizer's default.
        options: Further keyword arguments of the class, for example '{"momentum": 0.9}'.
        state_dtype: Dtype of the moments. auto: the weights' dtype (fp32 under mixed precision and bf16-master); bf16:
            half the memory, updated in fp32 and rounded stochastically.
        in_backward: Update each weight during the backward pass and free its gradient. Needs one device, no adapters,
            no clipping (max_norm 0) and no accumulation.
    """

    name: str = "AdamW"
    weight_decay: float | Auto = AUTO
    betas: tuple[float, float] | Auto = AUTO
    eps: float | Auto = AUTO
    options: dict[str, Any] = field(default_factory=dict)
    state_dtype: Literal["auto", "bf16"] = AUTO
    in_backward: bool = False

    def __post_init__(self) -> None:
        require_not_negative("optimizer", self, "weight_decay")
        require_positive("optimizer", self, "eps")
        is_valid = self.betas == AUTO or all(0 <= beta < 1 for beta in self.betas)
        hint = "must be two numbers from 0 (inclusive) to 1 (exclusive)"
        require_option(is_valid, "optimizer.betas", self.betas, hint)
        for name in OPTIMIZER_SHORTHANDS:
            value, is_repeated = getattr(self, name), name in self.options
            hint = "is also in --optimizer.options; remove one of them"
            require_option(value == AUTO or not is_repeated, f"optimizer.{name}", value, hint)


@dataclass(frozen=True)
class ProfilerArgs:
    """Profiler options; they require --profile.

    Args:
        wait: Steps of this launch before the profiler starts.
        warmup: Steps with the profiler running but not recording.
        active: Steps to record.
        record_shapes: Also record the shapes of the operators' inputs.
        with_stack: Also record the Python calls; slows down the recorded steps.
    """

    wait: int = 4
    warmup: int = 1
    active: int = 3
    record_shapes: bool = False
    with_stack: bool = False

    def __post_init__(self) -> None:
        require_not_negative("profiler", self, "wait", "warmup")
        require_positive("profiler", self, "active")


@dataclass(frozen=True)
class RunOptions:
    """Options that pretrain, finetune_full and finetune_lora share.

    Args:
        log: Output format, and names for loggers: project, run, group.
        resume: Resume from a checkpoint: true (the newest in out_dir), auto (the newest intact one, if any), or a path
            or URL.
        staging_dir: Local folder of a run whose out_dir is on remote storage. Default: in ~/.cache/toolkit/runs.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
        tokenizer_dir: A folder with a tokenizer.json. Default: the initial checkpoint; without one, the data module
            trains a tokenizer if it can.
        accelerator: Device type.
        devices: Devices per node. auto: all GPUs, one process on a CPU, or as set by torchrun or SLURM.
        num_nodes: Number of nodes. auto: 1, or as set by torchrun or SLURM.
        tensor_parallel_size: Devices of a node over which each matrix of a layer is split.
        context_parallel_size: Devices over which the tokens of a sequence are split.
        pipeline_parallel_size: Devices over which the layers are split. A step needs at least as many micro-batches.
        strategy: auto, single, ddp, fsdp (Fabric's FSDPStrategy, by torch's fully_shard), or an extension's. auto:
            single on one device; on several fsdp, or ddp if the other options do not support fsdp. Options of --fsdp or
            --ddp imply that strategy.
        preset: Choose sharding, micro-batch and activation checkpointing by the run's estimated memory. memory: the
            least memory; speed: SHARD_GRAD_OP if it fits, and large micro-batches; balanced: the defaults. Options
            with non-default values do not change.
        fsdp: FSDP options.
        ddp: DDP options.
        pipeline: Pipeline parallelism options.
        compiler: How to compile the blocks: auto, none, torch (torch.compile), or an extension's compiler. auto:
            torch on CUDA, if all rows have the same length and it saves more time than it takes; otherwise none.
        deterministic: Use deterministic algorithms only: slower on CUDA, no change on CPU.
        logger_name: Loggers in addition to logs/metrics.csv: tensorboard, wandb, mlflow, trackio, or several separated
            by commas; csv adds none.
        profile: Record a trace of a few steps on every rank in out_dir/profile, and print a time breakdown.
        profiler: Profiler options.
        callbacks: Class paths of callbacks, separated by commas, such as my_module.MyCallback; in YAML also a list of
            class_path and init_args. See tutorials/extend_callback.md.
        timeout: Minutes before an unresponsive process aborts the run. auto: 30 until the first step, then 5.
        max_restarts: How often the command starts a run again after a crash, such as a process that was killed, with
            --resume auto. A wrong option, a guard or a signal ends it.
        seed: Random seed of initial weights or adapters, and of the data order.
        dry_run: Do everything up to the first step, print sample rows, the plan and the files that the run would write,
            and exit. Writes nothing to out_dir. For several devices, one process reads rows, without the model.
    """

    is_flat: ClassVar[bool] = True  # the fields are options without a prefix

    log: LogArgs = LogArgs()
    resume: bool | str = False
    staging_dir: str | None = None
    verify_checkpoint: bool = True
    tokenizer_dir: str | None = None
    accelerator: Accelerator = "auto"
    devices: int | Auto = AUTO
    num_nodes: int | Auto = AUTO
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    strategy: str = "auto"
    preset: Literal["balanced", "memory", "speed"] = "balanced"
    fsdp: FSDPArgs = FSDPArgs()
    ddp: DDPArgs = DDPArgs()
    pipeline: PipelineArgs = PipelineArgs()
    compiler: str = AUTO
    deterministic: bool = False
    logger_name: str = "csv"
    profile: bool = False
    profiler: ProfilerArgs = ProfilerArgs()
    callbacks: str | list[Any] | None = None
    timeout: float | Auto = AUTO
    max_restarts: int = 0
    seed: int = DEFAULT_SEED
    dry_run: bool = False

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
        require_positive("", self, *sizes, "timeout")
        require_not_negative("", self, "max_restarts")
        require_option(0 <= self.seed < 2**32, "seed", self.seed, f"must be from 0 to {2**32 - 1}")
        require_one_of("strategy", self.strategy, STRATEGIES, "strategies")
        require_one_of("compiler", self.compiler, COMPILERS, "compilers")
        for name, value in vars(self.profiler).items():
            is_used = self.profile or value == getattr(ProfilerArgs, name)
            require_option(is_used, f"profiler.{name}", value, "has no effect without --profile")
