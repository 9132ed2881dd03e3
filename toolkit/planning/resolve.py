"""Resolve the options of a run into its configuration. Starts nothing; ``toolkit plan`` runs the same code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.folder import read_model_config, require_language_model
from toolkit.config import AUTO, FSDPArgs, Precision, TrainArgs, none_if_auto
from toolkit.data.base import choose_seq_length, trained_vocabulary
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.device import count_devices, device_memory, pick_precision
from toolkit.distributed.mesh import Layout, data_devices
from toolkit.distributed.model_parts import require_divisible
from toolkit.distributed.strategy import StrategyPlan, plan_strategy
from toolkit.distributed.world import detect_world
from toolkit.errors import UserError
from toolkit.extension import load_single
from toolkit.models.config import ModelConfig
from toolkit.models.families import DEFAULT_MODEL, family_of, get_config, is_extension_model
from toolkit.models.flops import matmul_parameters
from toolkit.models.fp8 import require_fp8
from toolkit.models.gpt import GPT
from toolkit.optim.classes import has_moments, optimizer_class, resolve_optimizer
from toolkit.optim.evaluation_weights import sets_weights
from toolkit.optim.schedule import Schedule
from toolkit.planning.batch_plan import BatchPlan, plan_batch
from toolkit.planning.compatibility import require_compatible
from toolkit.planning.facts import Facts
from toolkit.planning.frozen import find_frozen, frozen_flag
from toolkit.planning.limits import Limits
from toolkit.planning.meta_model import model_of
from toolkit.planning.run_args import RunArgs, with_options

DEFAULT_MODEL_TOKENS = 700_000
"""Training tokens for the default model if no limit is set."""
ASSUMED_CHARACTERS = 256
"""Vocabulary of characters in a plan of a text that is not prepared."""


@dataclass(frozen=True)
class DeviceSpec:
    """The devices of a run: ``devices`` per node of type ``device`` ("cuda", "cpu" or "mps").

    ``memory`` is bytes per device; infinity if unknown. ``has_bf16``: whether the GPU supports bfloat16; None checks
    this machine's GPU, and assumes True if it has none. ``gpu``: its name; empty if unknown.
    """

    device: str
    devices: int
    num_nodes: int
    memory: float = math.inf
    has_bf16: bool | None = None
    gpu: str = ""

    @classmethod
    def of_this_machine(cls, device: str, devices: int = 1, num_nodes: int = 1) -> DeviceSpec:
        """Return devices with this machine's memory. CPU memory is divided among the processes."""
        memory = device_memory(device) / (devices if device == "cpu" else 1)
        gpu = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else ""
        return cls(device, devices, num_nodes, memory, gpu=gpu)

    @property
    def world_size(self) -> int:
        """Number of devices on all nodes."""
        return self.devices * self.num_nodes

    @property
    def is_ampere(self) -> bool:
        """Whether the devices are GPUs with bfloat16 and TF32: Ampere and later."""
        if self.device == "cuda" and self.has_bf16 is None and torch.cuda.is_available():
            return torch.cuda.is_bf16_supported(including_emulation=False)
        return self.device == "cuda" and self.has_bf16 is not False


def device_spec_of(args: RunArgs, device_memory_gb: float | None = None) -> DeviceSpec:
    """Return the devices of a run. With --accelerator auto, assume GPUs, even if this machine has none.

    ``device_memory_gb`` is the memory of one device in GB (1e9 bytes); None takes this machine's, if known.
    """
    device = "cuda" if args.accelerator == "auto" else args.accelerator
    available = count_devices(device) if args.devices == "auto" else None
    environ = {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # ignore any launcher
    world = detect_world(args.devices, args.num_nodes, available or None, environ)
    spec = DeviceSpec.of_this_machine(device, world.devices, world.num_nodes)  # unknown without such a device
    return spec if device_memory_gb is None else replace(spec, memory=device_memory_gb * 1e9)


@dataclass(frozen=True)
class ResolvedConfig:
    """Resolved run configuration, before anything starts. ``StartState`` adds what depends on data and checkpoint.

    Args:
        args: The options. A named architecture may have no limit before :func:`toolkit.planning.data.complete`.
        devices: The devices of the run.
        precision: Compute precision; "-true" precisions also store the weights in it.
        strategy: The distributed strategy with its mesh.
        batch: The division of the global batch.
        model: The architecture; None for a user-provided module. The data may define its vocabulary and labels.
        max_seq_length: Tokens of the longest row; None for a user-provided module if not set.
        optimizer: See :func:`toolkit.optim.classes.resolve_optimizer`.
        frozen: The architecture of the objective's frozen model; None if it needs none.
        accumulate: FSDP's gradient accumulation mode.
        reasons: Reason for each "auto" option's value, for display.
        preset: The options set by ``--preset``, for display.
        is_ragged: Whether row lengths vary.
        limits, schedule: Limits and LR schedule over all launches; None before
            :func:`toolkit.planning.data.complete`, or if the data is not prepared and defines the length.
        length: Description of the length that a run without a limit gets.
    """

    args: RunArgs
    devices: DeviceSpec
    precision: Precision
    strategy: StrategyPlan
    batch: BatchPlan
    model: ModelConfig | None
    max_seq_length: int | None
    optimizer: dict[str, Any]
    frozen: ModelConfig | None = None
    accumulate: Literal["unsharded", "sharded"] = "unsharded"
    reasons: Mapping[str, str] = field(default_factory=dict)
    preset: str = ""
    is_ragged: bool = False
    limits: Limits | None = None
    schedule: Schedule | None = None
    length: str = ""

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None if unknown."""
        return None if self.limits is None else self.limits.total_steps

    @property
    def device(self) -> str:
        return self.devices.device

    @property
    def fsdp(self) -> FSDPArgs:
        """The FSDP options, with the accumulation resolved."""
        return replace(self.args.fsdp, accumulate=self.accumulate)


def resolve_model(args: RunArgs, devices: DeviceSpec) -> tuple[RunArgs, ModelConfig | None, int | None]:
    """Return the options with the run's limit, the architecture and the tokens per sequence.

    The architecture is None for a user-provided module, the length None if the data decides.

    Raises:
        UserError: the options do not fit the model, or the sizes of the layout do not divide it or the devices.
    """
    args = with_default_limit(args)
    requested = choose_seq_length(args.data, none_if_auto(args.train.max_seq_length), "train.max_seq_length")
    args = with_options(args, {"train.max_seq_length": requested or AUTO})
    model = choose_model(args)
    if model is not None:
        require_divisible(model, args.tensor_parallel_size)
    length = choose_length(args.train, model)
    require_equal_chunks(length, args.model_parallel)
    data_devices(args.model_parallel, devices.devices, devices.num_nodes)  # raises if the sizes do not divide them
    return args, model, length


def resolve(args: RunArgs, devices: DeviceSpec) -> ResolvedConfig:
    """Resolve a run whose micro-batch size and strategy are set, and check that the options are compatible.

    :func:`toolkit.planning.auto.resolve_auto` chooses them first, and the accumulation of gradients afterwards. This
    second stage needs torch; the first is :func:`toolkit.planning.training_options.run_args`.
    """
    args, model, length = resolve_model(args, devices)
    precision = choose_precision(args, devices)
    if (quantizer := load_single("quantizer")) is not None:
        model = quantizer.configure(args, precision, model)
    sizes = {"devices": devices.devices, "num_nodes": devices.num_nodes}
    strategy = plan_strategy(
        args.strategy,
        args.fsdp,
        args.ddp,
        **sizes,
        model_parallel=args.model_parallel,
        accelerator=devices.device,
        precision=precision,
        groups=args.groups,
    )
    micro_batch_size = args.train.micro_batch_size
    assert isinstance(micro_batch_size, int), "resolve_auto chooses it"
    ranks = args.model_parallel.world_size
    batch = plan_batch(
        args.train.global_batch_size, micro_batch_size, **sizes, model_parallel=ranks, answers=args.objective.answers
    )
    if args.train.fp8 != "none":
        require_fp8(args.train.fp8, devices.device, checks_gpu=devices.has_bf16 is None)
    optimizer = resolve_optimizer(args.optimizer, args.defaults, args.optimizer_class)
    cls = args.optimizer_class or optimizer_class(args.optimizer.name)
    if (is_schedule_free := sets_weights(cls)) and args.train.lr_schedule == TrainArgs.lr_schedule:
        args = with_options(args, {"train.lr_schedule": "constant"})
    require_compatible(
        Facts(
            args,
            precision,
            devices.device,
            devices.world_size,
            strategy,
            batch,
            has_moments="state_dtype" not in optimizer or args.optimizer_class is not None or has_moments(optimizer),
            needs_unsharded=getattr(cls, "needs_unsharded", False),
            model=model,
            sets_weights=is_schedule_free,
        )
    )
    if (ratio := args.loraplus_lr_ratio) != 1:
        optimizer["loraplus_lr_ratio"] = ratio
    return ResolvedConfig(
        args, devices, precision, strategy, batch, model, length, optimizer, choose_frozen(args, model, length)
    )


def choose_precision(args: RunArgs, devices: DeviceSpec) -> Precision:
    """Return the precision of the run. "auto" picks one that the other options support."""
    on_cuda: Precision = "bf16-mixed" if args.lora is None else "bf16-true"
    precision = pick_precision(args.precision, devices.device, on_cuda, devices.is_ampere)
    if (args.precision, precision) == (AUTO, "16-mixed") and (args.quantize is not None or args.fsdp.cpu_offload):
        return "32-true"  # they do not support 16-mixed
    return precision


def has_limit(train: TrainArgs) -> bool:
    """Whether the user limits the run."""
    return any(limit is not None for limit in (train.max_steps, train.max_tokens, train.epochs, train.max_time))


def with_default_limit(args: RunArgs) -> RunArgs:
    """Set the default length if the run has no limit. A named architecture's length needs the data's vocabulary."""
    if has_limit(args.train):
        return args
    epochs = args.objective.epochs or args.defaults.epochs
    if args.is_finetune and epochs is not None:
        return with_options(args, {"train.epochs": epochs})
    config = None if args.initial_checkpoint_dir is not None else choose_model(args)
    if config is not None and config.name == DEFAULT_MODEL:
        return with_options(args, {"train.max_tokens": DEFAULT_MODEL_TOKENS})
    if config is None or args.model_name is None:
        raise UserError(
            "--train.max_tokens: the run has no limit; "
            "set --train.max_tokens, --train.max_steps, --train.epochs or --train.max_time"
        )
    return args


def model_tokens(model: ModelConfig) -> int:
    """Return the training tokens that a model from scratch wants: 20 per parameter in matrix products."""
    return 20 * matmul_parameters(model_of(model, None))


def with_model_limit(args: RunArgs, model: ModelConfig, epoch_tokens: float = math.inf) -> tuple[RunArgs, str]:
    """Limit a run from scratch by the size of its model and of its data, and describe the limit.

    Sources: Hoffmann et al. (arXiv 2203.15556) for the tokens per parameter, Muennighoff et al. (2305.16264) for the
    epochs. The parameters are those in matrix products, of which a token uses all.
    """
    tokens = int(min(model_tokens(model), 4 * epoch_tokens))
    epochs = "" if epoch_tokens == math.inf else f", {tokens / epoch_tokens:.3g} epochs"
    text = f"{tokens:,} tokens{epochs}: 20 tokens per active parameter, at most 4 epochs of data of known size"
    return with_options(args, {"train.max_tokens": tokens}), text


def choose_model(args: RunArgs) -> ModelConfig | None:
    """Return the architecture, by name or from the initial checkpoint, with the user's overrides.

    For a user-provided module, return the config of a GPT, otherwise None.
    """
    if args.module is not None:
        return args.module.config if isinstance(args.module, GPT) else None
    if args.base_dir is not None:
        config = read_model_config(args.base_dir)
    else:
        config = get_config(args.model_name or DEFAULT_MODEL)
    config = config.override(args.model_config)
    if args.train.tie_embeddings is not None:
        config = replace(config, tie_embeddings=args.train.tie_embeddings)
    config = choose_head(args, config)
    family_of(config).validate(config)  # otherwise the trained model could not be exported
    return config


def choose_head(args: RunArgs, config: ModelConfig) -> ModelConfig:
    """Return the architecture with the objective's head. The labels of a new head are known with the data."""
    head = args.objective.head
    if config.head == head:
        return config
    if config.head is not None:
        raise UserError(
            f"checkpoint_dir {args.initial_checkpoint_dir}: has a {config.head} head, and no LM head; "
            f"use --head {config.head}, or start from the language model"
        )
    assert head is not None
    return config.with_head(head)


def read_reference_config(args: RunArgs, folder: Path, model: ModelConfig | None) -> ModelConfig:
    """Return the architecture of a teacher or reference. The initial checkpoint as reference quantizes as ``model``."""
    config = read_model_config(folder)
    if model and config.qat != model.qat and args.objective.has_reference and (base := args.base_dir):
        return replace(config, qat=model.qat) if base_fingerprint(folder) == base_fingerprint(base) else config
    return config


def choose_frozen(args: RunArgs, model: ModelConfig | None, length: int | None) -> ModelConfig | None:
    """Return the architecture of the objective's frozen model, and check that it can read rows of ``length`` tokens."""
    folder = find_frozen(args.objective)
    if folder is None:
        return None
    config, flag = read_reference_config(args, folder, model), frozen_flag(args.objective)
    require_language_model(config, flag)
    if is_extension_model(config):
        raise UserError(f"{flag}: is a model of an extension; use one of toolkit's own architectures")
    if length and length > config.block_size:
        hint = f"the model of {flag} takes at most {config.block_size} tokens; lower it"
        raise UserError(f"--train.max_seq_length {length}: {hint}")
    return config


def require_equal_chunks(length: int | None, layout: Layout) -> None:
    """Check that context-parallel ranks can share rows of ``length`` tokens equally."""
    if length is not None and (rest := length % layout.length_divisor):
        nearest = [n for n in (length - rest, length - rest + layout.length_divisor) if n]
        raise UserError(
            f"--train.max_seq_length {length}: must be a multiple of {layout.length_divisor} with "
            f"--context_parallel_size {layout.context}; use {' or '.join(map(str, nearest))}"
        )


def choose_length(train: TrainArgs, config: ModelConfig | None) -> int | None:
    """Return the tokens per sequence; None if the data decides."""
    user_length = none_if_auto(train.max_seq_length)
    if config is None:
        return user_length
    length = user_length or config.block_size
    if length > config.block_size:
        raise UserError(
            f"--train.max_seq_length {length}: {config.name or 'the model'} takes at most {config.block_size} tokens; "
            "lower it, or pretrain a model with a larger --model_config.block_size"
        )
    return length


def with_known_vocabulary(config: ModelConfig | None, args: RunArgs) -> ModelConfig:
    """Return the config with a vocabulary size, from the config, the tokenizer or the data module.

    The characters of a text are only counted when it is prepared.
    """
    assert config is not None, "user-provided modules have no plan"
    if config.vocab_size is not None:
        return config
    if folder := args.tokenizer_dir or args.base_dir:
        return config.with_vocab_size(Tokenizer.load(folder).vocab_size)
    size = trained_vocabulary(args.data)
    return config.with_vocab_size(ASSUMED_CHARACTERS if size == "characters" else size or None)
