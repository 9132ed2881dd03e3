"""Planning of a run before it starts: its settings, its memory, and changes that make it fit its devices.

All settings come from the same functions as in the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from toolkit.args import FINETUNE_FULL, FINETUNE_LORA, PRETRAIN, DDPArgs, Precision
from toolkit.checkpoints.folder import find_checkpoint_dir, write_model_files
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.device import count_devices, device_memory, pick_precision
from toolkit.distributed.strategy import StrategyPlan
from toolkit.distributed.world import detect_world
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config, suggest_names
from toolkit.models.gpt import GPT
from toolkit.models.lora_config import LoRAConfig
from toolkit.training.batch import BatchPlan
from toolkit.training.decide import ResolvedConfig, resolve_config
from toolkit.training.finetune import finetune_args
from toolkit.training.memory_plan import Memory, Parameters, TrainingSetup, build_on_meta, count_parameters, plan_memory
from toolkit.training.resolve import RunArgs

MAX_ADVISED_DEVICES = 8  # per node
MIN_ADVISED_LENGTH = 256  # tokens


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


@dataclass(frozen=True)
class Advice:
    """A change in addition to the previous ones: the flags, the resulting memory, and whether it fits."""

    change: str
    memory_gb: float
    fits: bool


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


# ---- advice

Change = tuple[str, RunArgs, DeviceSpec]
Step = Callable[[RunPlan], Iterator[Change]]


def advice_for(plan: RunPlan, device_memory_gb: float) -> list[Advice]:
    """Return changes, in order, after which the run fits; empty if it already fits.

    Changes without effect on the result come first, then those that reduce precision, then those that train less or
    need more hardware. Changes that do not help or are not needed are omitted. If no combination suffices, the last one
    does not fit.
    """
    limit = device_memory_gb * 1e9
    if plan.memory.total <= limit:
        return []
    taken: list[Step] = []
    current = plan
    for step in _STEPS:
        found = _take(step, current, limit)
        if found is not None:
            taken, current = [*taken, step], found[1]
            if current.memory.total <= limit:
                break
    chosen = _apply(taken, plan, limit)
    for step in taken[:-1]:
        fewer = [other for other in taken if other is not step]
        changes = _apply(fewer, plan, limit)
        fits = bool(changes) and changes[-1][1].memory.total <= limit
        # The remaining changes must not become larger: 4 bits are better than much shorter sequences.
        if fits and {text for text, _ in changes} <= {text for text, _ in chosen}:
            taken, chosen = fewer, changes
    return [Advice(text, p.memory.total / 1e9, p.memory.total <= limit) for text, p in chosen]


def _apply(steps: list[Step], plan: RunPlan, limit: float) -> list[tuple[str, RunPlan]]:
    done = []
    for step in steps:
        found = _take(step, plan, limit)
        if found is not None:
            done.append(found)
            plan = found[1]
    return done


def _take(step: Step, plan: RunPlan, limit: float) -> tuple[str, RunPlan] | None:
    """Return the first variant of a change that fits, otherwise the smallest; None if no variant helps."""
    best = None
    for text, args, spec in step(plan):
        try:
            changed = plan_run(args, spec)
        except UserError:  # the run would fail
            continue
        if changed.memory.total <= limit:
            return text, changed
        if changed.memory.total < (best[1] if best else plan).memory.total:
            best = (text, changed)
    return best


def _train(plan: RunPlan, **changes: Any) -> tuple[RunArgs, DeviceSpec]:
    return replace(plan.args, train=replace(plan.args.train, **changes)), plan.spec


def _smaller_micro_batch(plan: RunPlan) -> Iterator[Change]:
    per_rank = plan.batch.global_batch_size // plan.batch.world_size
    for micro in range(plan.batch.micro_batch_size - 1, 0, -1):
        if per_rank % micro == 0:
            yield f"--train.micro_batch_size {micro}", *_train(plan, micro_batch_size=micro)


def _full_shard(plan: RunPlan) -> Iterator[Change]:
    if plan.strategy.shards < plan.batch.world_size or plan.strategy.sharding == "SHARD_GRAD_OP":
        named = plan.args.strategy not in ("auto", "fsdp")
        fsdp = replace(plan.args.fsdp, sharding_strategy="FULL_SHARD")
        args = replace(plan.args, strategy="fsdp" if named else plan.args.strategy, fsdp=fsdp, ddp=DDPArgs())
        yield "--strategy fsdp " * named + "--fsdp.sharding_strategy FULL_SHARD", args, plan.spec


def _true_16_bits(plan: RunPlan) -> Iterator[Change]:
    if plan.precision != "bf16-true":
        yield "--precision bf16-true", replace(plan.args, precision="bf16-true"), plan.spec


def _no_accumulation(plan: RunPlan) -> Iterator[Change]:
    """Under accumulation FSDP keeps gradients unsharded: see distributed/fsdp.py."""
    if plan.strategy.kind == "fsdp" and plan.batch.accumulation > 1:
        size = plan.batch.micro_batch_size * plan.batch.world_size
        yield f"--train.global_batch_size {size}", *_train(plan, global_batch_size=size)


def _adapters(plan: RunPlan) -> Iterator[Change]:
    if plan.args.defaults is FINETUNE_FULL:
        yield "toolkit finetune_lora", replace(plan.args, defaults=FINETUNE_LORA, lora=LoRAConfig()), plan.spec


def _quantized(plan: RunPlan) -> Iterator[Change]:
    if plan.args.lora is not None and plan.args.quantize is None:
        yield "--quantize bnb.nf4", replace(plan.args, quantize="bnb.nf4"), plan.spec
        replicated = replace(plan.args, quantize="bnb.nf4", strategy="ddp")  # 4-bit weights are not sharded
        yield "--quantize bnb.nf4 --strategy ddp", replicated, plan.spec


def _shorter(plan: RunPlan) -> Iterator[Change]:
    length = 2 ** math.ceil(math.log2(plan.seq_length)) // 2
    while length >= MIN_ADVISED_LENGTH:
        yield f"--train.max_seq_length {length}", *_train(plan, max_seq_length=length)
        length //= 2


def _more_devices(plan: RunPlan) -> Iterator[Change]:
    devices = plan.spec.devices * 2
    while plan.spec.device == "cuda" and devices <= MAX_ADVISED_DEVICES:
        strategy = "auto" if plan.args.strategy == "single" else plan.args.strategy
        args = replace(plan.args, strategy=strategy)
        yield f"--devices {devices}", args, replace(plan.spec, devices=devices)
        devices *= 2


def _fewer_layers(plan: RunPlan) -> Iterator[Change]:
    layers = plan.config.n_layer // 2
    while plan.args.initial_checkpoint_dir is None and plan.args.lora is None and layers:
        config = replace(plan.args.model_config, n_layer=layers)
        yield f"--model_config.n_layer {layers}", replace(plan.args, model_config=config), plan.spec
        layers //= 2


_STEPS: list[Step] = [
    _smaller_micro_batch, _full_shard, _true_16_bits, _no_accumulation, _adapters, _quantized, _shorter, _more_devices,
    _fewer_layers,
]  # fmt: skip


def out_of_memory(args: RunArgs, spec: DeviceSpec, device_memory_gb: float | None = None) -> UserError:
    """Return the error for a run that is out of memory: its memory by part, and the changes to make.

    Args:
        args: The arguments of the run.
        spec: The devices of the run.
        device_memory_gb: Memory of one device in GB (1e9 bytes); read from CUDA by default.
    """
    size = args.train.micro_batch_size
    start = f"--train.micro_batch_size {size}: out of memory on {spec.device}"
    if args.module is not None:
        hint = "a smaller one" if size is None or size > 1 else "shorter sequences or more devices"
        return UserError(f"{start}; use {hint}")
    plan = plan_run(args, spec)
    if device_memory_gb is None:
        device_memory_gb = device_memory(spec.device) / 1e9
    # it did not fit, whatever the formula says: other processes may use a part of the device
    limit = min(device_memory_gb, 0.9 * plan.memory.total / 1e9)
    changes = ", then ".join(f"{a.change} ({a.memory_gb:.1f} GB)" for a in advice_for(plan, limit))
    hint = f"use {changes}" if changes else "use a smaller model"
    return UserError(f"{start}: this run needs about {_needs(plan.memory)}; {hint}")


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
            f"{config.name}: needs about {_needs(memory)} per device, but only {limit / 1e9:,.1f} GB is available; "
            "use a smaller model, or see toolkit plan --help for changes that make it fit"
        )


def _needs(memory: Memory) -> str:
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
    layout = detect_world(args.devices, args.num_nodes, available or None, environ)
    return DeviceSpec(device, layout.devices, layout.num_nodes)


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


@contextmanager
def oom_advice(args: RunArgs, place: DeviceSpec) -> Iterator[None]:
    """Turn running out of memory into a UserError with what the run needs and how it would fit."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_full = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not is_full:
            raise
        raise out_of_memory(args, place) from error
