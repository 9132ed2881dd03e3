"""Suggest changes that make a run fit in memory, before it starts or after an out-of-memory error."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch

from toolkit.config import AUTO, ActivationCheckpointing, DDPArgs
from toolkit.distributed.device import device_memory
from toolkit.errors import UserError
from toolkit.models.lora_config import LoRAConfig
from toolkit.planning.auto import MICRO_BATCH_SIZE, Changes, flags_of, with_options
from toolkit.planning.plan import RunPlan, format_memory, plan_run
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig
from toolkit.planning.run_args import RunArgs

MAX_ADVISED_DEVICES = 8  # per node
MIN_ADVISED_SEQ_LENGTH = 256  # tokens


@dataclass(frozen=True)
class Advice:
    """A change to make after the previous changes: its flags, the resulting memory, and whether the run then fits."""

    change: str
    memory_gb: float
    fits: bool
    node_memory_gb: float = 0.0
    quality_cost: str = ""


class MemoryLimits(NamedTuple):
    """Memory limits in bytes."""

    device: float
    node: float
    """CPU memory of a node, see :attr:`RunPlan.node_memory`."""

    def excess(self, plan: RunPlan) -> float:
        """Return the relative excess over the limits, summed over device and node; 0 if the run fits."""
        return max(plan.memory.total / self.device - 1, 0) + max(plan.node_memory / self.node - 1, 0)


_ROUNDS = "small updates round away: 4 % higher loss in a test"
Change = tuple[str, RunArgs, DeviceSpec]
Step = Callable[[RunPlan], Iterator[Change]]


def advice_for(plan: RunPlan, device_memory_gb: float, host_memory_gb: float = math.inf) -> list[Advice]:
    """Return an ordered list of changes that make the run fit; empty if it already fits.

    Changes that keep the result come first, then lower precision, then CPU offloading (slow), then changes that train
    less or need more hardware. Unhelpful and unneeded changes are omitted. If no combination fits, the last entry has
    ``fits`` False. ``device_memory_gb`` and ``host_memory_gb`` (CPU memory of a node) are in GB (1e9 bytes).
    """
    limits = MemoryLimits(device_memory_gb * 1e9, host_memory_gb * 1e9)
    if not limits.excess(plan):
        return []
    made = _apply_steps(_STEPS, plan, limits)
    steps = [step for step, _, _ in made]
    for step in steps[-2::-1]:  # try to drop each change, starting with the largest effect on the result
        fewer = [other for other in steps if other is not step]
        changes = _apply_steps(fewer, plan, limits)
        fits = bool(changes) and not limits.excess(changes[-1][2])
        # The remaining changes must not become larger: 4 bits are better than much shorter sequences.
        if fits and {text for _, text, _ in changes} <= {text for _, text, _ in made}:
            steps, made = fewer, changes
    return [
        Advice(
            text,
            p.memory.total / 1e9,
            not limits.excess(p),
            p.node_memory / 1e9,
            _ROUNDS if text == "--precision bf16-true" and p.args.lora is None else "",
        )
        for _, text, p in made
    ]


def _apply_steps(steps: list[Step], plan: RunPlan, limits: MemoryLimits) -> list[tuple[Step, str, RunPlan]]:
    """Return the steps that help, with their changes and the plans after them, until the run fits."""
    made = []
    for step in steps:
        applied = _apply_step(step, plan, limits) if limits.excess(plan) else None
        if applied is not None:
            made.append((step, *applied))
            plan = applied[1]
    return made


def _apply_step(step: Step, plan: RunPlan, limits: MemoryLimits) -> tuple[str, RunPlan] | None:
    """Return the first variant of a change that fits, else the variant with the least excess; None if none helps.

    A change by less than 2 % does not help: it may rule out others, such as bf16-master offloading.
    """
    best, least = None, 0.98 * limits.excess(plan)
    for text, args, spec in step(plan):
        try:
            changed = plan_run(args, spec)
        except UserError:  # the run would fail
            continue
        if (excess := limits.excess(changed)) < least:
            best, least = (text, changed), excess
        if not excess:
            break
    return best


def _set(plan: RunPlan, changes: Changes, unnamed: Changes | None = None) -> Change:
    """Return a change of options. ``unnamed`` options are also set, but are no part of its flags."""
    return flags_of(changes), with_options(plan.args, changes | (unnamed or {})), plan.config.devices


def _smaller_micro_batch(plan: RunPlan) -> Iterator[Change]:
    per_rank = plan.config.batch.global_batch_size // plan.config.batch.data_parallel
    for micro in range(plan.config.batch.micro_batch_size - 1, 0, -1):
        if per_rank % micro == 0:
            yield _set(plan, {MICRO_BATCH_SIZE: micro})


def _fsdp_compatible(plan: RunPlan) -> Iterator[Change]:
    """Replace bf16-master, which FSDP does not support."""
    if plan.args.precision == "bf16-master" and plan.config.strategy.kind == "ddp":
        yield _set(plan, {"precision": "bf16-mixed"} | ({} if plan.args.strategy == AUTO else {"strategy": "fsdp"}))


def _full_shard(plan: RunPlan) -> Iterator[Change]:
    strategy = plan.config.strategy
    if strategy.shards < strategy.layout.data_parallel or strategy.sharding == "SHARD_GRAD_OP":
        engine = {} if plan.args.strategy in (AUTO, "fsdp") else {"strategy": "fsdp"}
        yield _set(plan, engine | {"fsdp.sharding_strategy": "FULL_SHARD"}, {"ddp": DDPArgs()})


def _checkpointing(plan: RunPlan) -> Iterator[Change]:
    modes = get_args(ActivationCheckpointing)
    for mode in modes[modes.index(plan.args.train.activation_checkpointing) + 1 :]:
        yield _set(plan, {"train.activation_checkpointing": mode})


def _no_accumulation(plan: RunPlan) -> Iterator[Change]:
    """Use one micro-batch per step. With accumulation, gradients and activations are in memory together."""
    batch = plan.config.batch
    if plan.config.strategy.kind == "fsdp" and batch.accumulation > 1:
        yield _set(plan, {"train.global_batch_size": batch.micro_batch_size * batch.data_parallel})


def _train_adapters(plan: RunPlan) -> Iterator[Change]:
    """Train LoRA adapters. Resets the masters and bf16 moments that earlier changes may have set."""
    args = plan.args
    if args.command == "finetune_full":
        precision = AUTO if args.precision == "bf16-master" else args.precision
        changes: Changes = {"precision": precision, "optimizer.state_dtype": AUTO}
        yield "toolkit finetune_lora", *_set(plan, changes | {"command": "finetune_lora", "lora": LoRAConfig()})[1:]


def _shorten_sequences(plan: RunPlan) -> Iterator[Change]:
    length = 2 ** math.ceil(math.log2(plan.seq_length)) // 2
    while length >= MIN_ADVISED_SEQ_LENGTH:
        yield _set(plan, {"train.max_seq_length": length})
        length //= 2


def _more_devices(plan: RunPlan) -> Iterator[Change]:
    args, spec = plan.args, plan.config.devices
    changed = replace(args, strategy="auto" if args.strategy == "single" else args.strategy)
    devices = spec.devices * 2
    while spec.device == "cuda" and devices <= MAX_ADVISED_DEVICES:
        yield f"--devices {devices}", changed, replace(spec, devices=devices)
        devices *= 2


def _fewer_layers(plan: RunPlan) -> Iterator[Change]:
    """Train a model with fewer layers, as the last resort."""
    args, layers = plan.args, plan.model.n_layer // 2
    while args.initial_checkpoint_dir is None and args.lora is None and layers:
        flags, changed, devices = _set(plan, {"model_config.n_layer": layers})
        yield f"a smaller model: {flags}", changed, devices
        layers //= 2


def _change(applies: Callable[[RunPlan], bool], changes: Changes, unnamed: Changes | None = None) -> Step:
    """Return a step with a single change, for the plans to which it applies. See :func:`_set`."""
    return lambda plan: iter([_set(plan, changes, unnamed)] if applies(plan) else [])


def _can_offload(plan: RunPlan) -> bool:
    return plan.config.strategy.kind == "fsdp" or plan.config.strategy.layout.world_size == 1


_CPU_OFFLOAD: Changes = {"fsdp.cpu_offload": True}

# fmt: off
_STEPS: list[Step] = [
    _smaller_micro_batch,
    # refused with clipping or accumulation
    _change(lambda p: True, {"optimizer.in_backward": True}),
    _fsdp_compatible,
    _change(lambda p: p.config.strategy.kind == "fsdp" and p.config.batch.accumulation > 1,
            {"fsdp.accumulate": "sharded"}),
    _full_shard,
    _checkpointing,
    # weights in bf16 with fp32 masters: refused with sharding and with LoRA
    _change(lambda p: p.config.precision != "bf16-master", {"precision": "bf16-master"}),
    # refused with sharding and for optimizers without moments
    _change(lambda p: p.args.lora is None and p.args.optimizer.state_dtype == AUTO
            and p.config.precision != "bf16-true", {"optimizer.state_dtype": "bf16"}),
    # the frozen base model of a LoRA run
    _change(lambda p: p.args.lora is not None and p.config.precision != "bf16-true", {"precision": "bf16-true"}),
    # slow, with the same result; for LoRA, 4-bit weights are better
    _change(lambda p: p.args.lora is None and _can_offload(p), _CPU_OFFLOAD),
    _no_accumulation,
    _train_adapters,
    _change(lambda p: p.args.lora is not None and p.args.quantize is None, {"quantize": "bnb.nf4"}),
    # without LoRA, the run reports how many updates round away
    _change(lambda p: p.args.lora is None and p.config.precision not in ("bf16-true", "bf16-master"),
            {"precision": "bf16-true"}, {"optimizer.state_dtype": AUTO}),
    _change(_can_offload, _CPU_OFFLOAD),
    _shorten_sequences,
    _more_devices,
    _fewer_layers,
]
# fmt: on


_PAGE = " (see troubleshooting: out of memory)"


def out_of_memory(args: RunArgs, spec: DeviceSpec, is_auto: bool = False) -> UserError:
    """Return an out-of-memory error with a memory breakdown and suggested changes.

    Args:
        args: The resolved options, with the micro-batch that did not fit.
        spec: The devices of the run.
        is_auto: Whether the micro-batch was "auto". The advice then sets it, because "auto" would raise it again.
    """
    size = args.train.micro_batch_size
    start = f"--train.micro_batch_size {size}: out of memory on {spec.device}"
    if args.module is not None:
        hint = "a smaller one" if size != 1 else "shorter sequences or more devices"
        if args.block_classes and args.train.activation_checkpointing != "full":
            hint = f"--train.activation_checkpointing full, or {hint}"
        return UserError(f"{start}; use {hint}{_PAGE}")
    plan = plan_run(args, spec)
    # the run did not fit even if the estimate says so: other processes may use device memory
    limit = min(device_memory(spec.device), 0.9 * plan.memory.total) / 1e9
    advice = advice_for(plan, limit, device_memory("cpu") / 1e9)
    changes = ", then ".join(f"{a.change} ({a.memory_gb:.1f} GB)" for a in advice)
    if is_auto and changes and MICRO_BATCH_SIZE not in changes:
        changes += f", with --{MICRO_BATCH_SIZE} {size}"
    hint = f"use {changes}" if changes else "use a smaller model"
    return UserError(f"{start}: this run needs about {format_memory(plan.memory)}; {hint}{_PAGE}")


@contextmanager
def oom_advice(config: ResolvedConfig) -> Iterator[None]:
    """Convert an out-of-memory error to a UserError with a memory breakdown and suggested changes."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_full = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not is_full:
            raise
        raise out_of_memory(config.args, config.devices, MICRO_BATCH_SIZE in config.reasons) from error
