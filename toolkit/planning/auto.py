"""Resolve a run whose strategy and micro-batch size are "auto", or set by ``--preset``: choose by estimated memory.

Everything but :func:`resolve_auto` is a pure function of the options, the devices and the memory estimates.
"""

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from toolkit.config import AUTO, none_if_auto
from toolkit.distributed.mesh import Layout
from toolkit.distributed.stages import nearest_micro_batches
from toolkit.distributed.strategy import StrategyPlan, implied_strategy
from toolkit.errors import UserError, option_text
from toolkit.models.config import ModelConfig
from toolkit.planning.compatibility import ROWS
from toolkit.planning.facts import Facts
from toolkit.planning.resolve import (
    DeviceSpec,
    ResolvedConfig,
    device_bytes,
    resolve,
    resolve_model,
    with_known_vocabulary,
)
from toolkit.planning.run_args import RunArgs

MAX_SHARD_GRAD_OP_FRACTION, MAX_BATCH_MEMORY_FRACTION = 0.75, 0.85
"""Maximum fractions of device memory for SHARD_GRAD_OP and for a larger micro-batch. Memory is an estimate."""
MIN_EFFICIENT_TOKENS, MAX_TOKENS = 4_096, 32_768
"""Tokens per micro-batch: the minimum that keeps a GPU busy, and the maximum above which speed does not improve."""
MIN_MICRO_BATCHES_PER_STAGE = 4
"""In a pipeline: stages wait for at most (p - 1) / (5p - 1) of a step, less than 20 %."""
MICRO_BATCH_SIZE = "train.micro_batch_size"
_SHARE = "a device's share of the global batch"
UNKNOWN = "if memory is unknown before the run"

Changes = dict[str, Any]
"""New values by option, such as ``{"train.micro_batch_size": 8}``."""
MemoryEstimate = Callable[[RunArgs], float]
"""Returns a run's bytes per device; NaN if unknown before the run, infinity if the run would be refused."""


@dataclass(frozen=True)
class AutoChoices:
    """Run options with values chosen for "auto".

    Args:
        args: The options.
        reasons: Reason for each chosen value, by option, for display.
        preset: The changes of ``--preset``, for display.
    """

    args: RunArgs
    reasons: Mapping[str, str] = field(default_factory=dict)
    preset: str = ""


def resolve_auto(args: RunArgs, devices: DeviceSpec) -> ResolvedConfig:
    """Resolve a run, and choose the options that are "auto" or that ``--preset`` sets.

    Each candidate is resolved with :func:`toolkit.planning.resolve.resolve`, for its memory.
    """
    args, model, length = resolve_model(args, devices)
    choices = choose_options(args, devices, length, make_memory_estimator(model, args, devices))
    config = resolve(choices.args, devices)
    strategy, reason = config.strategy, choices.reasons.get("strategy")
    if reason is not None:
        reason = reason if strategy.kind == "ddp" else f"{reason}; {strategy.reason}"
        strategy = replace(strategy, reason=reason)
    return replace(config, strategy=strategy, reasons=choices.reasons, preset=choices.preset)


def make_memory_estimator(model: ModelConfig | None, args: RunArgs, devices: DeviceSpec) -> MemoryEstimate:
    """Return a function that estimates the memory of variants of ``args``.

    Memory is unknown for user-provided modules and optimizers, and if the data defines the vocabulary.
    """

    @functools.cache
    def complete_config() -> ModelConfig | None:
        with suppress(UserError):
            return None if model is None else with_known_vocabulary(model, args)
        return None

    def estimate(changed: RunArgs) -> float:
        try:
            config = resolve(changed, devices)
        except UserError:
            return math.inf
        return device_bytes(config, complete_config())

    return estimate


def choose_options(args: RunArgs, devices: DeviceSpec, length: int | None, estimate: MemoryEstimate) -> AutoChoices:
    """Choose the strategy and the micro-batch if they are "auto", and the options that ``--preset`` sets.

    The preset "memory" takes the combination with the least memory. Only options that have the command's default are
    changed.

    Args:
        devices: The devices of the run.
        length: Tokens of the longest row; None if unknown.
        estimate: Estimates the memory of variants of ``args``.
    """
    preset, args = args.preset, replace(args, preset="balanced")
    changes, reasons = _fit_devices(args, devices, length, estimate, is_speed=False)
    balanced = with_options(args, changes)
    if preset == "balanced":
        return AutoChoices(balanced, {option: f"auto: {reason}" for option, reason in reasons.items()})
    if preset == "speed":
        changes, _ = _fit_devices(args, devices, length, estimate, is_speed=True)
    else:
        changes = _minimize_memory(args, devices, estimate) or changes
    if not changes:
        return AutoChoices(args, preset=f"{preset}: nothing to change")
    chosen, flags = with_options(args, changes), flags_of(changes, ", ")
    if not (total := estimate(chosen)) < math.inf:
        return AutoChoices(chosen, preset=f"{preset}: {flags} (memory unknown for this model)")
    memory = f"about {_gb(total)} per device, {_gb(estimate(balanced))} by default"
    return AutoChoices(chosen, preset=f"{preset}: {flags} ({memory})")


def _fit_devices(
    args: RunArgs, devices: DeviceSpec, length: int | None, estimate: MemoryEstimate, *, is_speed: bool
) -> tuple[Changes, dict[str, str]]:
    """Choose the strategy and the micro-batch if they are "auto"; return the changes, and the reasons by option.

    The strategy is fsdp, or ddp if the other options do not support fsdp. ``is_speed`` uses SHARD_GRAD_OP if it fits
    with a margin. On CUDA and with ``is_speed``, the micro-batch is the largest that fits with a margin.
    """
    world_size = devices.devices * devices.num_nodes
    user_size, strategies = none_if_auto(args.train.micro_batch_size), _strategies(args, world_size, is_speed)
    if user_size is not None and strategies == [{}]:
        return {}, {}
    sizes = _sizes(args, world_size) if user_size is None else [user_size]
    default = max((size for size in sizes if size <= args.defaults.micro_batch_size), default=sizes[0])
    has_choice = user_size is None and length is not None and (devices.device == "cuda" or is_speed)
    busy = next((size for size in sizes if size * (length or 1) >= MIN_EFFICIENT_TOKENS), sizes[-1])

    def need(strategy: Changes, size: int) -> float:
        return estimate(with_options(args, strategy | {MICRO_BATCH_SIZE: size}))

    reasons, strategy, size = {}, strategies[-1], default
    if len(strategies) > 1:
        tried = busy if has_choice else default
        if (gathered := need(strategies[0], tried)) <= MAX_SHARD_GRAD_OP_FRACTION * devices.memory < math.inf:
            strategy = strategies[0]
            reasons["strategy"] = (
                f"it takes {_gb(gathered)}, at most {MAX_SHARD_GRAD_OP_FRACTION:.0%} of {_gb(devices.memory)}"
            )
    if strategy.get("strategy") == "fsdp" and need(strategy, default) == math.inf != need({"strategy": "ddp"}, default):
        strategy, reasons["strategy"] = {"strategy": "ddp"}, _why_not_fsdp(args)
    if has_choice and devices.memory < math.inf:
        by_size: dict[int, float] = {}
        room, is_enough = MAX_BATCH_MEMORY_FRACTION * devices.memory, False
        for size in sizes:  # smallest first; after one that is too large only the last, which accumulates nothing
            if not is_enough or (size == sizes[-1] and size * (length or 1) <= MAX_TOKENS):
                by_size[size] = need(strategy, size)
                is_enough = is_enough or room < by_size[size] < math.inf or size * (length or 1) > MAX_TOKENS
        stages = args.model_parallel.pipeline
        limit = _SHARE if stages == 1 else f"more would leave {stages} stages too few micro-batches"
        size, reasons[MICRO_BATCH_SIZE] = choose_size(by_size, default, length or 1, devices.memory, limit)
    elif user_size is None:
        where = UNKNOWN if devices.device == "cuda" else f"on {devices.device}"
        reasons[MICRO_BATCH_SIZE] = f"up to {args.defaults.micro_batch_size} {where}"
    return strategy | ({MICRO_BATCH_SIZE: size} if user_size is None else {}), reasons


def choose_size(
    memory_by_size: Mapping[int, float], default: int, length: int, memory: float, limit: str = _SHARE
) -> tuple[int, str]:
    """Return the largest micro-batch size that fits with a margin, up to :data:`MAX_TOKENS`, and the reason.

    If none fits, return the smallest size. If the memory is unknown, return ``default``.

    Args:
        memory_by_size: Bytes by micro-batch size, smallest size first, see :data:`MemoryEstimate`.
        default: The command's default size.
        length: Tokens per sequence.
        memory: Bytes of a device.
        limit: Why there is no larger size.
    """
    possible = {size: total for size, total in memory_by_size.items() if total < math.inf}
    if not possible:
        return default, f"up to {default} {UNKNOWN}"  # or the run is refused
    room = MAX_BATCH_MEMORY_FRACTION * memory
    short = [size for size in possible if size * length <= MAX_TOKENS] or [min(possible)]
    size = max((size for size in short if possible[size] <= room), default=min(possible))
    larger = next((other for other in possible if other > size), None)
    takes = f"takes {_gb(possible[size])}"
    if possible[size] > room:
        return size, f"{takes}; no size takes at most {MAX_BATCH_MEMORY_FRACTION:.0%} of {_gb(memory)}"
    if larger is None:
        return size, f"{limit}; {takes} of {_gb(memory)}"
    if larger not in short:
        return size, f"{size * length:,} tokens; {takes} of {_gb(memory)}"
    return size, f"{takes}; {larger} would take more than {MAX_BATCH_MEMORY_FRACTION:.0%} of {_gb(memory)}"


def _why_not_fsdp(args: RunArgs) -> str:
    """Return the first row of the table that the options violate with fsdp and not with ddp."""
    needs_unsharded = getattr(args.optimizer_class, "needs_unsharded", False)
    facts = Facts(args, none_if_auto(args.precision) or "", needs_unsharded=needs_unsharded)
    fsdp, ddp = (replace(facts, strategy=StrategyPlan(kind, None, Layout(shard=2), "")) for kind in ("fsdp", "ddp"))
    reasons = (row.message(fsdp) for row in ROWS if row.applies(fsdp) and not row.applies(ddp))
    return next(reasons, "fsdp does not support the other options").partition(";")[0]


def _strategies(args: RunArgs, world_size: int, is_speed: bool) -> list[Changes]:
    """Return the strategy changes to try, fastest first. An empty change keeps the current strategy."""
    user_strategy = implied_strategy(args.fsdp, args.ddp) if args.strategy == AUTO else args.strategy
    gathers = is_speed and world_size > 1 and args.fsdp.sharding_strategy == args.fsdp.shard_size == AUTO
    if user_strategy is not None or world_size == 1:
        return [{"fsdp.sharding_strategy": "SHARD_GRAD_OP"}, {}] if gathers and user_strategy == "fsdp" else [{}]
    gathered = [{"strategy": "fsdp", "fsdp.sharding_strategy": "SHARD_GRAD_OP"}] if gathers else []
    return [*gathered, {"strategy": "fsdp"}]


def _sizes(args: RunArgs, world_size: int) -> list[int]:
    """Return the micro-batch sizes that divide a device's share of the global batch; 1 if the share is uneven.

    With a pipeline only those that leave several micro-batches per stage, if possible.
    """
    per_device, rest = divmod(args.train.global_batch_size, world_size // args.model_parallel.world_size)
    sizes = [1] if rest else [size for size in range(1, per_device + 1) if per_device % size == 0]
    stages, schedule = args.model_parallel.pipeline, args.pipeline.schedule
    if stages == 1 or rest:
        return sizes
    valid = [n for n in sizes if nearest_micro_batches(schedule, stages, per_device // n) == [per_device // n]]
    many = [n for n in valid if per_device // n >= MIN_MICRO_BATCHES_PER_STAGE * stages]
    return many or valid[:1] or sizes[:1]


# ---- preset memory


def _minimize_memory(args: RunArgs, devices: DeviceSpec, estimate: MemoryEstimate) -> Changes | None:
    """Return the changes with the least memory, or the most changes if memory is unknown; None if none would run."""
    world_size, default = devices.devices * devices.num_nodes, args.defaults.micro_batch_size
    choices: dict[str, list[Any]] = {
        MICRO_BATCH_SIZE: [size for size in _sizes(args, world_size) if size <= default],
        "train.activation_checkpointing": ["none", "full"],
        "strategy": ["fsdp", "ddp"] if _strategies(args, world_size, False) != [{}] else [],
        "fsdp.sharding_strategy": [AUTO, "FULL_SHARD"] if devices.num_nodes > 1 else [],
        "fsdp.accumulate": [AUTO, "sharded"],
    }
    usual = {MICRO_BATCH_SIZE: AUTO, "train.activation_checkpointing": "none"}
    free = {option: values for option, values in choices.items() if _get(args, option) == usual.get(option, AUTO)}
    free = {option: values for option, values in free.items() if values}
    variants: list[tuple[float, int, Changes]] = []
    for values in product(*free.values()):
        changes = {o: v for o, v in zip(free, values, strict=True) if v != _get(args, o)}
        total = estimate(with_options(args, changes))
        if total < math.inf:
            variants.append((total, len(changes), changes))
        elif math.isnan(total):  # prefer the variant that runs with the most changes
            variants.append((math.inf, -len(changes), changes))
    if not variants:
        return None  # resolving raises the error
    return min(variants, key=lambda each: (each[0], each[1], each[2].get(MICRO_BATCH_SIZE, 0)))[2]


def _get(args: RunArgs, option: str) -> Any:
    group, _, name = option.rpartition(".")
    return getattr(getattr(args, group) if group else args, name)


def with_options(args: RunArgs, changes: Changes) -> RunArgs:
    """Return a copy of ``args`` with the changes applied."""
    for option, value in changes.items():
        group, _, name = option.rpartition(".")
        args = replace(args, **({group: replace(getattr(args, group), **{name: value})} if group else {name: value}))
    return args


def flags_of(changes: Changes, separator: str = " ") -> str:
    """Return changes as on the command line."""
    return separator.join(f"--{option} {option_text(value)}" for option, value in changes.items())


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e9:.2g} GB"
