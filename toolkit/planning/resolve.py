"""From what the user asked for to what the run will be, before anything starts; ``toolkit plan`` is the same code."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from toolkit.checkpoints.folder import read_model_config
from toolkit.checkpoints.remote.run import check_out_dir
from toolkit.config import AUTO, FSDPArgs, Precision, TrainArgs, none_if_auto
from toolkit.data.base import choose_seq_length
from toolkit.distributed.device import device_memory, pick_precision
from toolkit.distributed.strategy import StrategyPlan, plan_strategy
from toolkit.errors import UserError, require_option
from toolkit.extension import registered, run_checks
from toolkit.models.config import ModelConfig
from toolkit.models.families import DEFAULT_MODEL, family_of, get_config
from toolkit.models.gpt import GPT
from toolkit.models.lora import adapted_on_meta
from toolkit.optim.classes import HYBRID, has_moments, resolve_optimizer
from toolkit.optim.hybrid import Muon
from toolkit.planning.auto import choose_options
from toolkit.planning.batch import BatchPlan, plan_batch
from toolkit.planning.compatibility import check_in_backward, check_low_memory
from toolkit.planning.memory import plan_memory
from toolkit.planning.run_args import RunArgs, hyperparameters
from toolkit.planning.setup import TrainingSetup, with_known_vocabulary

DEFAULT_MODEL_TOKENS = 700_000
"""Length of pretraining the default model without a limit."""


@dataclass(frozen=True)
class DeviceSpec:
    """The devices of a run: ``devices`` per node of a kind ("cuda", "cpu" or "mps").

    ``memory`` is that of one device in bytes; infinity if unknown. ``has_bf16``: whether a GPU has bfloat16; None: as
    those of this machine, and assumed where it has none.
    """

    device: str
    devices: int
    num_nodes: int
    memory: float = math.inf
    has_bf16: bool | None = None

    @classmethod
    def of_this_machine(cls, device: str, devices: int = 1, num_nodes: int = 1) -> DeviceSpec:
        """With the memory of a device of this machine; processes share that of the CPU."""
        return cls(device, devices, num_nodes, device_memory(device) / (devices if device == "cpu" else 1))


@dataclass(frozen=True)
class ResolvedConfig:
    """A run before anything is started. What its data and its checkpoint add is in the trainer's ``StartState``.

    Args:
        args: The user's, with at least one limit of the run.
        devices: Where it runs.
        precision: Of the compute, and of the weights if it is a "-true" one.
        strategy: The distributed strategy with its mesh.
        batch: Division of the global batch.
        model: The architecture; None for a user-provided module. The data may define its vocabulary.
        max_seq_length: Tokens of the longest row; None where the rows of a user-provided module decide.
        optimizer: See :func:`toolkit.optim.classes.resolve_optimizer`.
        accumulate: How FSDP keeps gradients between micro-batches.
        reasons: Why options that were "auto" have their values, for display.
        preset: What ``--preset`` has set, for display.
    """

    args: RunArgs
    devices: DeviceSpec
    precision: Precision
    strategy: StrategyPlan
    batch: BatchPlan
    model: ModelConfig | None
    max_seq_length: int | None
    optimizer: dict[str, Any]
    accumulate: Literal["unsharded", "sharded"] = "unsharded"
    reasons: Mapping[str, str] = field(default_factory=dict)
    preset: str = ""

    @property
    def device(self) -> str:
        return self.devices.device

    @property
    def fsdp(self) -> FSDPArgs:
        """The FSDP options, with the accumulation resolved."""
        return replace(self.args.fsdp, accumulate=self.accumulate)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the options that repeat this run, see :func:`toolkit.planning.run_args.hyperparameters`."""
        names = ("weight_decay", "betas", "eps")
        optimizer = replace(self.args.optimizer, **{n: v for n, v in self.optimizer.items() if n in names})
        if self.optimizer["name"] == Muon.__name__:
            split = {"split_qkv": self.optimizer.get("split_qkv", False)}
            optimizer = replace(optimizer, options=optimizer.options | split)
        # auto compiles on CUDA only: elsewhere it chose nothing that a repetition on CUDA should keep
        has_no_choice = "compiler" in self.reasons and self.device != "cuda"
        compiler = AUTO if has_no_choice else self.args.compiler
        args = replace(self.args, precision=self.precision, optimizer=optimizer, compiler=compiler)
        return hyperparameters(args)


def resolve(args: RunArgs, devices: DeviceSpec) -> ResolvedConfig:
    """Resolve what the user left open, and check that the options go together."""
    _check_options(args)
    args = with_length(args)
    given = choose_seq_length(args.data, none_if_auto(args.train.max_seq_length), "train.max_seq_length")
    args = replace(args, train=replace(args.train, max_seq_length=given or AUTO))
    model = choose_model(args)
    length = choose_length(args.train, model)
    chosen = choose_options(args, devices, length, _needs_of(model, args, devices))
    args = chosen.args
    precision = choose_precision(args, devices)
    sizes = {"devices": devices.devices, "num_nodes": devices.num_nodes}
    strategy = plan_strategy(
        args.strategy,
        args.fsdp,
        args.ddp,
        **sizes,
        accelerator=devices.device,
        precision=precision,
        groups=args.groups,
    )
    if (reason := chosen.reasons.get("strategy")) is not None:
        reason = reason if strategy.kind == "ddp" else f"{reason}; {strategy.reason}"
        strategy = replace(strategy, reason=reason)
    if (strategy.kind, devices.device, os.environ.get("TORCH_DISTRIBUTED_DEBUG")) == ("ddp", "cpu", "DETAIL"):
        raise UserError("TORCH_DISTRIBUTED_DEBUG=DETAIL: torch's ddp crashes under it on a CPU; use --strategy fsdp")
    if args.timeout != AUTO and devices.devices * devices.num_nodes == 1:
        raise UserError(f"--timeout {args.timeout}: would have no effect, one process waits for no other")
    if args.lora is not None:
        _require_fit_for_adapters(args, precision)
    micro_batch_size = args.train.micro_batch_size
    assert isinstance(micro_batch_size, int), "chosen above"
    batch = plan_batch(args.train.global_batch_size, micro_batch_size, **sizes)
    if args.ddp.static_graph and batch.accumulation > 1:
        raise UserError(
            f"--ddp.static_graph true: torch does not support it with accumulation ({batch}); use "
            f"--train.micro_batch_size {batch.global_batch_size // batch.world_size}"
        )
    if args.optimizer.in_backward:
        if strategy.offloads:
            raise UserError("--optimizer.in_backward true: does not go with --fsdp.cpu_offload true; leave one out")
        check_in_backward(
            has_adapters=args.lora is not None,
            world_size=batch.world_size,
            accumulation=batch.accumulation,
            max_norm=args.train.max_norm,
            precision=precision,
            is_torch_optimizer=args.optimizer_class is None,
        )
    if args.module is not None and not args.block_classes:
        _refuse_without_blocks(args, strategy.kind)
    _check_units(args, strategy)
    if strategy.kind == "fsdp" and args.optimizer.name.lower() == "adafactor":
        raise UserError(
            "--optimizer.name Adafactor: looks at whole matrices, and fsdp gives it parts; use --strategy ddp or AdamW"
        )
    optimizer = resolve_optimizer(args.optimizer, precision, args.defaults, args.optimizer_class)
    if (ratio := args.loraplus_lr_ratio) != 1:
        require_option(0 < ratio < math.inf, "loraplus_lr_ratio", ratio, "must be greater than zero")
        optimizer["loraplus_lr_ratio"] = ratio
    check_low_memory(
        optimizer,
        precision,
        strategy.kind,
        is_extension=strategy.extension is not None,
        has_adapters=args.lora is not None,
        has_blocks=args.module is None or bool(args.block_classes),
        is_hybrid=optimizer["name"] in HYBRID,
        has_moments="state_dtype" not in optimizer or has_moments(optimizer),
        is_builtin=args.optimizer_class is None and optimizer["name"] not in registered("optimizers"),
    )
    config = ResolvedConfig(args, devices, precision, strategy, batch, model, length, optimizer)
    return replace(config, accumulate=choose_accumulate(config), reasons=chosen.reasons, preset=chosen.preset)


def _needs_of(model: ModelConfig | None, args: RunArgs, devices: DeviceSpec) -> Callable[[RunArgs], float]:
    """Return the function from a variant of ``args`` to the bytes on a device, see :data:`toolkit.planning.auto.Needs`.

    Unknown are user-provided modules and optimizers, and a vocabulary that the data defines.
    """

    @functools.cache
    def known() -> tuple[ModelConfig, GPT]:
        config = with_known_vocabulary(model, args)
        return config, adapted_on_meta(config, args.lora)

    def needs(changed: RunArgs) -> float:
        try:
            config = resolve(changed, devices)
        except UserError:
            return math.inf
        if model is None or args.module is not None or args.optimizer_class is not None:
            return math.nan
        try:
            full_config, built = known()
        except UserError:
            return math.nan
        return plan_memory(setup_of(config, full_config), built).total

    return needs


def choose_accumulate(config: ResolvedConfig) -> Literal["unsharded", "sharded"]:
    """Return how FSDP keeps gradients between micro-batches: sharded if requested, or if unsharded ones do not fit.

    Unsharded where that is not known before the run: the memory of the device, the vocabulary, a user-provided module
    or optimizer.
    """
    args, model, memory = config.args, config.model, config.devices.memory
    choice = args.fsdp.accumulate
    is_fsdp = config.strategy.kind == "fsdp" and config.strategy.extension is None
    accumulates = is_fsdp and config.batch.accumulation > 1 and args.lora is None
    if choice != AUTO:
        why = "adapters are replicated" if args.lora is not None else f"nothing is accumulated: {config.batch}"
        if not accumulates:
            raise UserError(f"--fsdp.accumulate {choice}: would have no effect, {why}; leave it out")
        if choice == "sharded" and config.strategy.offloads:
            raise UserError(
                "--fsdp.accumulate sharded: does not go with --fsdp.cpu_offload true, FSDP cannot add to gradients in "
                "CPU memory; use micro-batches as large as the global batch"
            )
        return choice
    if not accumulates or config.strategy.offloads or memory == math.inf:
        return "unsharded"
    if model is None or model.vocab_size is None or args.module is not None or args.optimizer_class is not None:
        return "unsharded"
    return "unsharded" if plan_memory(setup_of(config, model)).total <= memory else "sharded"


def setup_of(config: ResolvedConfig, model: ModelConfig) -> TrainingSetup:
    """Return the inputs of the memory formulas; ``model`` includes the vocabulary size."""
    args, batch = config.args, config.batch
    return TrainingSetup(
        config=model,
        precision=config.precision,
        strategy=config.strategy,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        seq_length=config.max_seq_length or model.block_size,
        optimizer=config.optimizer,
        device=config.device,
        lora=args.lora,
        quantize=args.quantize,
        packed=getattr(args.data, "packing", "none") != "none",
        fsdp=config.fsdp,
        ddp=args.ddp,
        optimizer_class=args.optimizer_class,
        activation_checkpointing=args.train.activation_checkpointing,
        in_backward=args.optimizer.in_backward,
        async_save=args.train.async_save,
    )


def _refuse_without_blocks(args: RunArgs, strategy: str) -> None:
    """Refuse options that need the blocks of a user-provided module."""
    hint = "and none were found; name them: block_classes"
    if strategy == "fsdp" and args.fsdp.auto_wrap == "block":
        raise UserError(f"--strategy fsdp: shards the blocks of a model, {hint}")
    mode = args.train.activation_checkpointing
    hint = f"recomputes the blocks of a model, {hint}"
    require_option(mode == "none", "train.activation_checkpointing", mode, hint)


def _check_units(args: RunArgs, strategy: StrategyPlan) -> None:
    """Refuse what needs complete blocks as units of FSDP, and what is not proven with offloading."""
    fsdp, mode = args.fsdp, args.train.activation_checkpointing
    needs_blocks = {f"--compiler {args.compiler}": args.compiler not in (AUTO, "none")}
    needs_blocks |= {f"--train.activation_checkpointing {mode}": mode != "none"}
    needs_blocks |= {f"--quantize {args.quantize}": args.quantize is not None}
    for option, is_given in needs_blocks.items():
        if is_given and strategy.kind == "fsdp" and fsdp.auto_wrap != "block":
            raise UserError(f"--fsdp.auto_wrap {fsdp.auto_wrap}: is not proven with {option}; leave one out")
    if strategy.offloads and args.quantize is not None:
        raise UserError(f"--fsdp.cpu_offload true: is not proven with --quantize {args.quantize}; leave one out")


def choose_precision(args: RunArgs, devices: DeviceSpec) -> Precision:
    """Return the precision of the run; auto is one that goes with its other options."""
    on_cuda: Precision = "bf16-mixed" if args.lora is None else "bf16-true"
    has_bf16 = True if devices.has_bf16 is None and not torch.cuda.is_available() else devices.has_bf16
    precision = pick_precision(args.precision, devices.device, on_cuda, has_bf16)
    if (args.precision, precision) == (AUTO, "16-mixed") and (args.quantize is not None or args.fsdp.cpu_offload):
        return "32-true"  # they are not proven with 16-mixed
    return precision


def _check_options(args: RunArgs) -> None:
    run_checks(args)
    if not args.out_dir:
        raise UserError("--out_dir '': give the name of a folder")
    check_out_dir(args.out_dir, args.staging_dir)
    if args.model_name is not None and args.initial_checkpoint_dir is not None:
        raise UserError(
            f"model_name {args.model_name}: --initial_checkpoint_dir {args.initial_checkpoint_dir} brings its own "
            "architecture; leave one of them out"
        )


def has_length(train: TrainArgs) -> bool:
    """Whether a limit is given."""
    return any(limit is not None for limit in (train.max_steps, train.max_tokens, train.epochs, train.max_time))


def with_length(args: RunArgs) -> RunArgs:
    """Give a run without a limit its default length."""
    if has_length(args.train):
        return args
    if args.defaults.epochs is not None:
        return replace(args, train=replace(args.train, epochs=args.defaults.epochs))
    config = None if args.initial_checkpoint_dir is not None else choose_model(args)
    if config is None or config.name != DEFAULT_MODEL:
        raise UserError(
            "--train.max_tokens: the length of the run must be given; "
            "set --train.max_tokens, --train.max_steps, --train.epochs or --train.max_time"
        )
    return replace(args, train=replace(args.train, max_tokens=DEFAULT_MODEL_TOKENS))


def _require_fit_for_adapters(args: RunArgs, precision: Precision) -> None:
    """Refuse options that do not go with adapters, or with a quantized base."""
    if args.quantize is not None:
        if precision == "16-mixed":
            raise UserError(
                f"--precision 16-mixed: is not proven with --quantize {args.quantize}; use bf16-true or 32-true"
            )
        if args.compiler not in (AUTO, "none"):
            raise UserError(f"--compiler {args.compiler}: does not go with --quantize {args.quantize}; leave one out")
    if args.fsdp.state_dict_type == "sharded":
        raise UserError(
            "--fsdp.state_dict_type sharded: would have no effect, every device holds all adapters; leave it out"
        )
    if args.train.tie_embeddings is not None:
        raise UserError(f"--train.tie_embeddings {args.train.tie_embeddings}: the base stays as it is; leave it out")


def choose_model(args: RunArgs) -> ModelConfig | None:
    """The named architecture or the initial checkpoint's, with the user's changes; None for a user-provided module."""
    if args.module is not None:
        return args.module.config if isinstance(args.module, GPT) else None
    if args.base_dir is not None:
        config = read_model_config(args.base_dir)
    else:
        config = get_config(args.model_name or DEFAULT_MODEL)
    config = config.override(args.model_config)
    if args.train.tie_embeddings is not None:
        config = replace(config, tie_embeddings=args.train.tie_embeddings)
    family_of(config).validate(config)  # an architecture of no family could be trained, but never exported
    return config


def choose_length(train: TrainArgs, config: ModelConfig | None) -> int | None:
    """Tokens per sequence; None where the data decides."""
    given = none_if_auto(train.max_seq_length)
    if config is None:
        return given
    length = given or config.block_size
    if length > config.block_size:
        raise UserError(
            f"--train.max_seq_length {length}: {config.name or 'the model'} takes at most {config.block_size} tokens; "
            "lower it, or pretrain a model with a larger --model_config.block_size"
        )
    return length
