"""A run before it starts: its settings, its parameters and its memory, from the same functions as in the run itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from toolkit.checkpoints.folder import find_checkpoint_dir, write_model_files
from toolkit.config import FINETUNE_FULL, FINETUNE_LORA, PRETRAIN, Precision
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.device import count_devices, device_memory, pick_precision
from toolkit.distributed.strategy import StrategyPlan
from toolkit.distributed.world import detect_world
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config, suggest_names
from toolkit.models.gpt import GPT
from toolkit.planning.batch import BatchPlan
from toolkit.planning.finetune import finetune_args
from toolkit.planning.memory import Memory, Parameters, build_on_meta, count_parameters, plan_memory
from toolkit.planning.resolve import ResolvedConfig, resolve_config
from toolkit.planning.run_args import RunArgs
from toolkit.planning.setup import TrainingSetup


@dataclass(frozen=True)
class DeviceSpec:
    """The devices of a run: ``devices`` per node of a kind ("cuda", "cpu" or "mps")."""

    device: str
    devices: int
    num_nodes: int


@dataclass(frozen=True)
class RunPlan:
    """The settings and needs of the run of ``args``."""

    args: RunArgs
    spec: DeviceSpec
    config: ModelConfig
    precision: Precision
    strategy: StrategyPlan
    batch: BatchPlan
    seq_length: int
    optimizer: dict[str, Any]
    parameters: Parameters
    memory: Memory

    @property
    def tokens_per_step(self) -> int:
        """Upper bound: rows may be shorter than the longest one."""
        return self.batch.global_batch_size * self.seq_length


def plan_run(args: RunArgs, spec: DeviceSpec) -> RunPlan:
    """Plan a run.

    Raises:
        UserError: an error in the arguments, with the run's message.
    """
    train = args.train
    if all(limit is None for limit in (train.max_steps, train.max_tokens, train.epochs, train.max_time)):
        args = replace(args, train=replace(train, max_steps=1))  # the length does not matter here
    decided = resolve_config(args, spec.device, spec.devices, spec.num_nodes, choose_precision(args, spec.device))
    args = replace(decided.args, precision=args.precision)  # commands differ in their default
    batch, seq_length = decided.batch, decided.max_seq_length
    config = with_known_vocabulary(decided.config, args)
    assert seq_length is not None
    setup = setup_of(decided, config)
    model = build_on_meta(setup)
    parameters, memory = count_parameters(model), plan_memory(setup, model)
    return RunPlan(
        args, spec, config, decided.precision, decided.strategy, batch, seq_length, decided.optimizer, parameters,
        memory,
    )  # fmt: skip


def setup_of(decided: ResolvedConfig, config: ModelConfig) -> TrainingSetup:
    """Return the inputs of the memory formulas; ``config`` includes the vocabulary size."""
    args, batch = decided.args, decided.batch
    return TrainingSetup(
        config, decided.precision, decided.strategy, batch.micro_batch_size, batch.accumulation, decided.max_seq_length,
        decided.optimizer, decided.device,
        args.lora, args.quantize, getattr(args.data, "packing", "none") != "none", args.fsdp, args.ddp,
        args.optimizer_class,
    )  # fmt: skip


def choose_precision(args: RunArgs, device: str) -> Precision:
    """Return the precision of the run; assumes bfloat16 support for GPUs of other machines."""
    if device == "cuda" and not torch.cuda.is_available():
        return args.precision or args.defaults.cuda_precision
    return pick_precision(args.precision, device, args.defaults.cuda_precision)


def with_known_vocabulary(config: ModelConfig | None, args: RunArgs) -> ModelConfig:
    """Return the config with the vocabulary size of the given tokenizer, or of the one trained on the data.

    Raises:
        UserError: the vocabulary size is unknown before the data is prepared.
    """
    assert config is not None, "user-provided modules have no plan"
    if config.vocab_size is not None:
        return config
    if folder := args.tokenizer_dir or args.initial_checkpoint_dir:
        tokenizer = Tokenizer.load(folder if args.tokenizer_dir else find_checkpoint_dir(folder))
        return config.with_vocab_size(tokenizer.vocab_size)
    size = getattr(args.data, "vocab_size", None)
    if size is None:
        raise UserError(
            f"--tokenizer_dir: {config.name} takes its vocabulary from the tokenizer; "
            "give one, or --model_config.vocab_size"
        )
    return config.with_vocab_size(size)


def require_memory(decided: ResolvedConfig, devices: int, config: ModelConfig, model: GPT) -> None:
    """Check that weights, gradients and optimizer state fit the memory of the devices.

    Otherwise the run would initialize weights for minutes until the operating system kills it without a message.

    Args:
        decided: The resolved configuration of the run.
        devices: Devices per node; on a CPU these are processes that share its memory.
        config: The model's config, including the vocabulary size.
        model: The model on the meta device.

    Raises:
        UserError: the memory does not suffice; the message names the model and both sizes.
    """
    limit = device_memory(decided.device) / (devices if decided.device == "cpu" else 1)
    memory = plan_memory(setup_of(decided, config), model)
    if memory.training_state > limit:
        raise UserError(
            f"{config.name}: needs about {format_needs(memory)} per device, but only {limit / 1e9:,.1f} GB is "
            "available; use a smaller model, or see toolkit plan --help for changes that make it fit"
        )


def format_needs(memory: Memory) -> str:
    largest = sorted(memory.parts().items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:,.1f}" for name, size in largest)
    return f"{memory.total / 1e9:,.1f} GB ({parts}, ...)"


# ---- from the arguments of a command


def device_spec_of(args: RunArgs) -> DeviceSpec:
    """Return the devices of the run of ``args``: GPUs, present or not, unless another accelerator is given.

    Raises:
        UserError: an invalid number of devices or nodes.
    """
    device = "cuda" if args.accelerator == "auto" else args.accelerator
    available = count_devices(device) if args.devices == "auto" else None
    environ = {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # ignore any launcher
    world = detect_world(args.devices, args.num_nodes, available or None, environ)
    return DeviceSpec(device, world.devices, world.num_nodes)


@contextmanager
def run_args_of(command: str, given: dict[str, Any]) -> Iterator[RunArgs]:
    """Yield the run arguments that a training command derives from its options.

    A missing checkpoint folder is replaced by a temporary folder with the config of the named architecture.

    Raises:
        UserError: the options conflict, or there is neither a folder nor an architecture of that name.
    """
    option = "initial_checkpoint_dir" if command == "pretrain" else "checkpoint_dir"
    value = given[option]
    with TemporaryDirectory() as folder:
        if value is not None and not any(path.exists() for path in (Path(value), Path("checkpoints") / value)):
            write_model_files(
                Path(folder), state_dict=None, config=_config_of(option, value), hyperparameters=None, tokenizer=None
            )
            given = given | {option: folder}
        if command == "pretrain":
            yield RunArgs(defaults=PRETRAIN, **given)
        else:
            yield finetune_args({"finetune_full": FINETUNE_FULL, "finetune_lora": FINETUNE_LORA}[command], given)


def _config_of(option: str, value: str) -> ModelConfig:
    try:
        return get_config(value)
    except UserError as error:
        raise UserError(
            f"{option} {value}: no such folder, here or below checkpoints/, and no architecture of that name"
            f"{suggest_names(value)}"
        ) from error
