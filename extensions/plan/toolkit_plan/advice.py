"""Suggest changes that make a run fit in memory, before it starts or after an out-of-memory error."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from toolkit.config import AUTO, ActivationCheckpointing, DDPArgs
from toolkit.distributed.device import device_memory
from toolkit.errors import UserError
from toolkit.models.lora_config import LoRAConfig
from toolkit.planning.auto import MICRO_BATCH_SIZE, micro_batch_sizes
from toolkit.planning.planner import OUT_OF_MEMORY
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.run_args import Changes, RunArgs, with_options
from toolkit_plan.by_memory import flags_of
from toolkit_plan.plan import RunPlan, plan_run

MAX_ADVISED_DEVICES = 8  # per node
MIN_ADVISED_SEQ_LENGTH = 256  # tokens
MIN_GAIN = 0.02
"""Relative gain below which a change does not help: it may rule out others, such as bf16-master offloading."""


@dataclass(frozen=True)
class Advice:
    """A change to make after the previous changes: its flags, the resulting memory, and whether the run then fits."""

    change: str
    memory_gb: float
    fits: bool
    node_memory_gb: float = 0.0
    quality_cost: str = ""


_ROUNDS = "small updates round away: 4 % higher loss in a test"
Step = Callable[[RunPlan], Iterable[Changes]]
"""Returns the variants of a change, in the order in which they are tried."""


def _set(option: str, *values: Any, lora: bool | None = None) -> Step:
    """Return a step with the values of one option, for runs with or without LoRA, or for all."""
    return lambda plan: [{option: value} for value in values if lora in (None, plan.args.lora is not None)]


class Applied(NamedTuple):
    """A step that helps: its best variant as flags, and the plan with it."""

    step: Step
    text: str
    plan: RunPlan


def advice_for(plan: RunPlan, device_memory_gb: float, host_memory_gb: float = math.inf) -> list[Advice]:
    """Return an ordered list of changes that make the run fit; empty if it already fits.

    Changes that keep the result come first, then lower precision, then CPU offloading (slow), then changes that train
    less or need more hardware. Unhelpful and unneeded changes are omitted. If no combination fits, the last entry has
    ``fits`` False. ``device_memory_gb`` and ``host_memory_gb`` (CPU memory of a node) are in GB (1e9 bytes).
    """

    def excess(plan: RunPlan) -> float:
        """Return the relative excess over the limits, summed over device and node; 0 if the run fits."""
        used = (plan.memory.total, device_memory_gb), (plan.node_memory, host_memory_gb)
        return sum(max(size / (1e9 * limit) - 1, 0) for size, limit in used)

    made = apply_steps(_STEPS, plan, excess)
    for dropped in made[-2::-1]:  # try to drop each change, starting with the largest effect on the result
        fewer = apply_steps([each.step for each in made if each.step is not dropped.step], plan, excess)
        fits = bool(fewer) and not excess(fewer[-1].plan)
        # The remaining changes must not become larger: 4 bits are better than much shorter sequences.
        if fits and {each.text for each in fewer} <= {each.text for each in made}:
            made = fewer
    return [
        Advice(
            text,
            changed.memory.total / 1e9,
            not excess(changed),
            changed.node_memory / 1e9,
            _ROUNDS if text == "--precision bf16-true" and changed.args.lora is None else "",
        )
        for _, text, changed in made
    ]


def apply_steps(steps: Iterable[Step], plan: RunPlan, cost: Callable[[RunPlan], float]) -> list[Applied]:
    """Apply steps one after the other, each with its best variant, until the cost is 0; omit those that do not help.

    A variant's cost must be at least :data:`MIN_GAIN` lower. The first without cost is taken.
    """
    applied = []
    for step in steps:
        best, least = None, (1 - MIN_GAIN) * cost(plan)
        for changes in step(plan) if least else ():
            spec = plan.config.devices
            spec = replace(spec, devices=changes.get("devices", spec.devices))
            try:
                changed = plan_run(with_options(plan.args, changes), spec, plan.rows)
                value = cost(changed)
            except UserError:  # the run would fail, or its cost is unknown
                continue
            if value < least:
                best, least = Applied(step, _text(changes), changed), value
            if not value:
                break
        if best is not None:
            applied.append(best)
            plan = best.plan
    return applied


def _text(changes: Changes) -> str:
    """Return changes as on the command line, or as words if flags alone do not say what they do."""
    if "command" in changes:
        return f"toolkit {changes['command']}"
    return ("a smaller model: " if "model_config.n_layer" in changes else "") + flags_of(changes)


def _smaller_micro_batch(plan: RunPlan) -> Iterator[Changes]:
    for size in reversed(micro_batch_sizes(plan.args, plan.config.devices.world_size)):
        if size < plan.config.batch.micro_batch_size:
            yield {MICRO_BATCH_SIZE: size}


def _fsdp_compatible(plan: RunPlan) -> Iterator[Changes]:
    """Replace bf16-master, which FSDP does not support."""
    if plan.args.precision == "bf16-master" and plan.config.strategy.kind == "ddp":
        yield {"precision": "bf16-mixed", "strategy": AUTO if plan.args.strategy == AUTO else "fsdp"}


def _full_shard(plan: RunPlan) -> Iterator[Changes]:
    engine = {} if plan.args.strategy in (AUTO, "fsdp") else {"strategy": "fsdp"}
    yield engine | {"fsdp.sharding_strategy": "FULL_SHARD", "ddp": DDPArgs()}


def _no_accumulation(plan: RunPlan) -> Iterator[Changes]:
    """Use one micro-batch per step. With accumulation, gradients and activations are in memory together."""
    batch = plan.config.batch
    if plan.config.strategy.kind == "fsdp":
        yield {"train.global_batch_size": batch.micro_batch_size * batch.data_parallel}


def _gather_for_every_token(plan: RunPlan) -> Iterator[Changes]:
    """Generate answers with sharded weights, which is slow."""
    if plan.memory.gathered_weights:
        yield {"objective.gather_weights": False}


def _train_adapters(plan: RunPlan) -> Iterator[Changes]:
    """Train LoRA adapters. Resets the masters and bf16 moments that earlier changes may have set."""
    args = plan.args
    if args.command == "finetune_full":
        precision = AUTO if args.precision == "bf16-master" else args.precision
        reset = {"precision": precision, "optimizer.state_dtype": AUTO}
        yield reset | {"command": "finetune_lora", "lora": LoRAConfig()}


def _shorten_sequences(plan: RunPlan) -> Iterator[Changes]:
    length = 2 ** math.ceil(math.log2(plan.seq_length)) // 2
    while length >= MIN_ADVISED_SEQ_LENGTH:
        yield {"train.max_seq_length": length}
        length //= 2


def _more_devices(plan: RunPlan) -> Iterator[Changes]:
    engine = {"strategy": AUTO} if plan.args.strategy == "single" else {}
    devices = plan.config.devices.devices * 2
    while plan.config.device == "cuda" and devices <= MAX_ADVISED_DEVICES:
        yield engine | {"devices": devices}
        devices *= 2


def _fewer_layers(plan: RunPlan) -> Iterator[Changes]:
    """Train a model with fewer layers, as the last resort."""
    args, layers = plan.args, plan.model.n_layer // 2
    while args.initial_checkpoint_dir is None and args.lora is None and layers:
        yield {"model_config.n_layer": layers}
        layers //= 2


def _round_updates(plan: RunPlan) -> Iterator[Changes]:
    """Train bf16 weights without fp32 masters; the run reports how many updates round away."""
    if plan.args.lora is None and plan.config.precision != "bf16-master":
        yield {"precision": "bf16-true", "optimizer.state_dtype": AUTO}


_STEPS: list[Step] = [
    _smaller_micro_batch,
    _set("optimizer.in_backward", True),  # refused with clipping or accumulation
    _fsdp_compatible,
    _set("fsdp.accumulate", "sharded"),  # refused without fsdp or accumulation
    _full_shard,
    _set("train.activation_checkpointing", *get_args(ActivationCheckpointing)),
    _set("precision", "bf16-master"),  # bf16 weights with fp32 masters: refused with sharding and with LoRA
    _set("optimizer.state_dtype", "bf16", lora=False),  # refused for optimizers without moments
    _set("precision", "bf16-true", lora=True),  # the frozen base model
    _set("fsdp.cpu_offload", True, lora=False),  # slow, with the same result; for LoRA, 4-bit weights are better
    _no_accumulation,
    _gather_for_every_token,
    _train_adapters,
    _set("quantize", "bnb.nf4", lora=True),
    _round_updates,
    _set("fsdp.cpu_offload", True, lora=True),
    _shorten_sequences,
    _more_devices,
    _fewer_layers,
]


def out_of_memory(args: RunArgs, spec: DeviceSpec, is_auto: bool = False) -> UserError:
    """Return an out-of-memory error with a memory breakdown and suggested changes.

    Args:
        args: The resolved options, with the micro-batch that did not fit.
        spec: The devices of the run.
        is_auto: Whether the micro-batch was "auto". The advice then sets it, because "auto" would raise it again.
    """
    size = args.train.micro_batch_size
    start = f"--train.micro_batch_size {size}: out of memory on {spec.device}"
    plan = plan_run(args, spec)
    # the run did not fit even if the estimate says so: other processes may use device memory
    limit = min(device_memory(spec.device), 0.9 * plan.memory.total) / 1e9
    advice = advice_for(plan, limit, device_memory("cpu") / 1e9)
    changes = ", then ".join(f"{a.change} ({a.memory_gb:.1f} GB)" for a in advice)
    if is_auto and changes and MICRO_BATCH_SIZE not in changes:
        changes += f", with --{MICRO_BATCH_SIZE} {size}"
    hint = f"use {changes}" if changes else "use a smaller model"
    return UserError(f"{start}: this run needs about {plan.memory}; {hint}{OUT_OF_MEMORY}")
